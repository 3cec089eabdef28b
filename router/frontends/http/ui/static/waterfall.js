// Where the time of an answer went: one bar, its stages in the order in which they happen, figures on demand.

import { el, set, svg } from "./dom.js";
import { bytes, seconds } from "./format.js";

const STAGES = [
  ["router_queue_seconds", "router queue"],
  ["placement_seconds", "placement"],
  ["prefill_queue_seconds", "prefill queue"],
  ["prefill_seconds", "prefill"],
  ["handoff_exposed_seconds", "hand-off, exposed"],
  ["decode_queue_seconds", "decode queue"],
  ["decode_seconds", "decode"],
];
const WIDTH = 600;
const LEAST = 5; // a stage that took any time can be seen

export function waterfall(timings) {
  const stages = STAGES.map(([field, name], index) => ({ name, css: `g${index}`, seconds: timings[field] || 0 }));
  const rows = stages.map((stage) => el("tr", {},
    el("th", { scope: "row" }, el("span", { class: `square ${stage.css}` }), stage.name),
    el("td", {}, seconds(stage.seconds))));
  rows.push(el("tr", {}, el("th", { scope: "row" }, "from request to end"), el("td", {}, seconds(timings.total_seconds))));
  return el("details", { class: "waterfall" },
    el("summary", {}, bar(stages), el("span", { class: "soft" }, whereAndHow(timings))),
    el("table", {}, el("tbody", {}, ...rows)));
}

function bar(stages) {
  const shown = stages.filter((stage) => stage.seconds > 0);
  const whole = shown.reduce((sum, stage) => sum + stage.seconds, 0) || 1;
  const room = WIDTH - LEAST * shown.length;
  const words = shown.map((stage) => `${stage.name} ${seconds(stage.seconds)}`).join(", ");
  const picture = svg("svg", { role: "img", "aria-label": words, preserveAspectRatio: "none" });
  set(picture, { viewBox: `0 0 ${WIDTH} 10` });
  let x = 0;
  for (const stage of shown) {
    const width = LEAST + (room * stage.seconds) / whole;
    const title = svg("title", {}, `${stage.name}: ${seconds(stage.seconds)}`);
    picture.append(svg("rect", { class: stage.css, x, y: 0, width: Math.max(1, width - 2), height: 10 }, title));
    x += width;
  }
  return picture;
}

function whereAndHow(timings) {
  const { prefill_worker: prefill, decode_worker: decode, kv_bytes_shipped: shipped, transport } = timings;
  if (!shipped) return decode ? `all on ${decode}` : "";
  const way = decode ? `${prefill} → ${decode}, ` : ""; // only admins are told who it was
  return `${way}${bytes(shipped)} of KV${transport ? ` by ${transport}` : ""}`;
}
