// The figures of now: one glance says whether the cluster is well.

import { el, say } from "./dom.js";
import { bytesPerSecond, count, number, seconds, share } from "./format.js";

const TILES = [
  ["Time to first token", (now) => seconds(now.ttft.p50), (now) => `p99 ${seconds(now.ttft.p99)}`],
  ["Between tokens", (now) => seconds(now.itl.p50), (now) => `p99 ${seconds(now.itl.p99)}`],
  ["Output", (now) => number(now.output_tokens_per_second), () => "tokens/s"],
  ["Requests", (now) => `${number(now.requests_per_second)}/s`, (now) => `${count(now.requests_in_flight)} in flight`],
  ["Prompts cached", (now) => share(now.cached_ratio), (now) => `of ${number(now.prompt_tokens_per_second)} tokens/s`],
  ["KV handed over", (now) => bytesPerSecond(now.kv_bytes_per_second), (now, live) => handoffs(live)],
];

function handoffs(live) {
  if (live.now.no_handoff) return `no hand-offs: ${live.now.no_handoff}`;
  const rate = live.flows.reduce((sum, flow) => sum + flow.handoffs_per_second, 0);
  return `${number(rate)} hand-offs/s`;
}

export function makeTiles(parent) {
  const tiles = TILES.map(([name, value, more]) => {
    const big = el("p", { class: "value" }, "–");
    const small = el("p", { class: "more" }, "\u00a0");
    parent.append(el("div", { class: "tile" }, el("h2", {}, name), big, small));
    return { big, small, value, more };
  });
  return (live) => {
    for (const { big, small, value, more } of tiles) {
      say(big, value(live.now));
      say(small, more(live.now, live));
    }
  };
}
