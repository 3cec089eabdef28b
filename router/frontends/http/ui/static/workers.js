// The same as the picture, as a table: for reading closely, and for screen readers.

import { el, keep, say, set } from "./dom.js";
import { bytesPerSecond, count, number, share } from "./format.js";

const COLUMNS = [
  ["Worker", (worker) => worker.id],
  ["Role", (worker) => worker.role],
  ["State", (worker) => worker.state],
  ["Running", (worker) => count(worker.running)],
  ["Waiting", (worker) => count(worker.waiting)],
  ["KV use", (worker) => share(worker.kv_usage_ratio)],
  ["Prefix hits", (worker) => share(worker.prefix_hit_ratio)],
  ["Prompt tokens/s", (worker) => number(worker.prompt_tokens_per_second)],
  ["Output tokens/s", (worker) => number(worker.output_tokens_per_second)],
  ["Hand-offs/s", (worker) => number(worker.handoffs_per_second)],
  ["KV out or in", (worker, live) => bytesPerSecond(moved(worker, live))],
];

/** Bytes a second that a worker hands over or is given. */
export function moved(worker, live) {
  const end = worker.role === "prefill" ? "from" : "to";
  return live.flows.reduce((sum, flow) => sum + (flow[end] === worker.id ? flow.bytes_per_second : 0), 0);
}

/** Prefill first, as a request meets them. */
export function inOrder(workers, role) {
  return workers.filter((worker) => worker.role === role).sort((a, b) => (a.id < b.id ? -1 : 1));
}

export function makeWorkers(parent) {
  const body = el("tbody");
  const empty = el("p", { class: "soft" }, "No worker is registered.");
  const head = el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)));
  const table = el("table", {}, el("thead", {}, head), body);
  parent.append(table, empty);
  const rows = new Map();
  const make = (worker) => {
    const name = el("th", { scope: "row" }, worker.id);
    const cells = [name, ...COLUMNS.slice(1).map(() => el("td"))];
    return { element: el("tr", {}, ...cells), cells };
  };
  return (live) => {
    const workers = [...inOrder(live.workers, "prefill"), ...inOrder(live.workers, "decode")];
    empty.hidden = workers.length > 0;
    table.hidden = workers.length === 0;
    keep(body, rows, workers, (worker) => worker.id, make, (row, worker) => {
      COLUMNS.forEach(([, value], index) => say(row.cells[index], value(worker, live)));
      set(row.cells[2], { class: `state ${worker.state}` });
    });
  };
}
