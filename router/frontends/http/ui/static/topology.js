// Workers, and KV flowing between them. Elements are kept between updates, so that animations continue.

import { keep, say, set, svg } from "./dom.js";
import { bytesPerSecond, count, duration, number, share } from "./format.js";
import { curve, layOut } from "./layout.js";
import { inOrder, moved } from "./workers.js";

const MAX_IDLE_EDGES = 64; // more lines than that would hide the ones that matter

export function makeTopology(parent) {
  const edges = svg("g");
  const nodes = svg("g");
  const headings = svg("g", { class: "headings" });
  const picture = svg("svg", { role: "img" }, edges, nodes, headings);
  parent.append(picture);
  const kept = { edges: new Map(), nodes: new Map(), headings: new Map() };
  let last = null;
  const draw = (live) => {
    last = live;
    const groups = groupsOf(live);
    const named = groups.map(({ name, nodes: all }) => ({ name, nodes: all.map((node) => node.key) }));
    const width = parent.clientWidth || 600;
    // The card is as high as its neighbour; the picture fills it, and grows only where its nodes need more.
    parent.style.minHeight = `${layOut(named, width, 0).height}px`;
    const plan = layOut(named, width, parent.clientHeight);
    set(picture, { viewBox: `0 0 ${width} ${plan.height}`, height: plan.height, "aria-label": inWords(live) });
    keep(headings, kept.headings, plan.headings, (one) => one.name, makeHeading, moveHeading);
    keep(nodes, kept.nodes, groups.flatMap((group) => group.nodes), (node) => node.key, makeNode, (one, node) =>
      showNode(one, node, plan.places.get(node.key)));
    keep(edges, kept.edges, edgesOf(live, groups), (edge) => edge.key, makeEdge, (one, edge) =>
      showEdge(one, edge, curve(plan.places.get(edge.from), plan.places.get(edge.to), plan.wide)));
  };
  new ResizeObserver(() => last && draw(last)).observe(parent);
  return draw;
}

function groupsOf(live) {
  const routers = live.routers.map((router) => ({
    key: `router ${router.id}`,
    role: "router",
    name: router.id,
    state: router.state,
    lines: [
      [`${count(router.requests_in_flight)} in flight`, `${number(router.requests_per_second)} req/s`],
      [`up ${duration(router.uptime_seconds)}`, `${number(router.output_tokens_per_second)} tok/s`],
    ],
  }));
  const workers = (role, line) => inOrder(live.workers, role).map((worker) => ({
    key: `worker ${worker.id}`,
    role,
    name: worker.id,
    state: worker.state,
    fill: worker.kv_usage_ratio,
    lines: [
      [`KV ${share(worker.kv_usage_ratio)}`, `${count(worker.running)} run · ${count(worker.waiting)} wait`],
      line(worker),
    ],
  }));
  const prefill = workers("prefill", (worker) =>
    [`${share(worker.prefix_hit_ratio)} hits`, `${number(worker.prompt_tokens_per_second)} tok/s`]);
  const decode = workers("decode", (worker) =>
    [bytesPerSecond(moved(worker, live)), `${number(worker.output_tokens_per_second)} tok/s`]);
  const groups = [{ name: "Routers", nodes: routers }, { name: "Prefill", nodes: prefill }, { name: "Decode", nodes: decode }];
  return prefill.length ? groups : [groups[0], groups[2]]; // decode workers may prefill for themselves
}

function edgesOf(live, groups) {
  const found = new Map();
  const add = (from, to, kind, rate) => found.set(`${from} → ${to}`, { key: `${from} → ${to}`, from, to, kind, rate });
  for (let column = 0; column + 1 < groups.length; column += 1) {
    const [left, right] = [groups[column].nodes, groups[column + 1].nodes];
    if (left.length * right.length > MAX_IDLE_EDGES) continue;
    for (const a of left) {
      for (const b of right) add(a.key, b.key, column === 0 ? "ask" : "kv", 0);
    }
  }
  const there = new Set(groups.flatMap((group) => group.nodes.map((node) => node.key)));
  for (const flow of live.flows) {
    const [from, to] = [`worker ${flow.from}`, `worker ${flow.to}`];
    if (there.has(from) && there.has(to)) add(from, to, "kv", flow.bytes_per_second);
  }
  return found.values();
}

function inWords(live) {
  const of = (role) => live.workers.filter((worker) => worker.role === role).length;
  const moving = bytesPerSecond(live.now.kv_bytes_per_second);
  return `${live.routers.length} routers, ${of("prefill")} prefill and ${of("decode")} decode workers, `
    + `KV moving at ${moving}; the table of workers below has the details`;
}

function makeHeading(heading) {
  return { element: svg("text", { class: "heading" }, heading.name) };
}

function moveHeading(one, { x, y }) {
  set(one.element, { x, y });
}

function makeNode(node) {
  const one = {
    box: svg("rect", { class: "box", rx: 10 }),
    dot: svg("circle", { r: 4 }),
    name: svg("text", { class: "name" }),
    state: svg("text", { class: "word", "text-anchor": "end" }),
    track: svg("rect", { class: "track", height: 6, rx: 3 }),
    fill: svg("rect", { class: "fill", height: 6, rx: 3 }),
    low: [0, 1].map(() => [svg("text", { class: "low" }), svg("text", { class: "low", "text-anchor": "end" })]),
    title: svg("title"),
  };
  const parts = [one.title, one.box, one.dot, one.name, one.state, one.track, one.fill, ...one.low.flat()];
  one.element = svg("g", { class: `node ${node.role}` }, ...parts);
  return one;
}

function showNode(one, node, { x, y, width, height, small }) {
  const pad = 12;
  const inner = width - 2 * pad;
  const hasBar = node.fill !== undefined;
  set(one.element, { transform: `translate(${x},${y})`, class: `node ${node.role} ${node.state.replace(" ", "-")}` });
  set(one.box, { width, height });
  const line = small ? 16 : 24;
  set(one.dot, { cx: pad + 4, cy: line - 4.5 });
  const word = node.state === "ready" ? "" : node.state;
  set(one.state, { x: width - pad, y: line });
  say(one.state, word);
  set(one.name, { x: pad + 15, y: line });
  sayShortened(one.name, node.name, inner - 15 - (word ? 8 + 7 * word.length : 0));
  const bar = { x: pad, y: small ? 23 : 35, visibility: hasBar ? null : "hidden" };
  set(one.track, { ...bar, width: inner });
  set(one.fill, { ...bar, width: Math.max(node.fill > 0 ? 5 : 0, inner * Math.min(1, node.fill || 0)) });
  one.low.forEach((texts, row) => texts.forEach((text, column) => {
    const place = { x: column ? width - pad : pad, y: (hasBar ? 58 : 50) + 18 * row, visibility: small ? "hidden" : null };
    set(text, place);
    say(text, node.lines[row][column]);
  }));
  say(one.title, [node.name, node.state, ...node.lines.flat()].filter(Boolean).join(", "));
}

/** Cut in the middle where there is no room for all of it: names differ at their ends. */
function sayShortened(text, name, room) {
  const asked = `${name}|${Math.round(room)}`;
  if (text.dataset.asked === asked) return;
  text.dataset.asked = asked;
  say(text, name);
  for (let left = name.length - 1; left > 4 && text.getComputedTextLength() > room; left -= 1) {
    const end = Math.min(6, left >> 1);
    say(text, `${name.slice(0, left - end)}…${name.slice(-end)}`);
  }
}

function makeEdge(edge) {
  const one = { line: svg("path", { class: "line" }), dots: svg("path", { class: "dots" }), title: svg("title") };
  one.element = svg("g", { class: `edge ${edge.kind}` }, one.title, one.line, one.dots);
  return one;
}

function showEdge(one, edge, path) {
  const moving = edge.rate > 0;
  // Thickness follows the logarithm: 1 KiB/s is a thread, 1 GiB/s a rope.
  const width = moving ? Math.min(11, 2 + 0.42 * Math.max(0, Math.log2(edge.rate / 1024))) : 1.2;
  set(one.element, { class: `edge ${edge.kind}${moving ? " moving" : ""}` });
  set(one.line, { d: path, "stroke-width": width.toFixed(1) });
  set(one.dots, { d: path, "stroke-width": Math.max(2, width * 0.7).toFixed(1), visibility: moving ? null : "hidden" });
  say(one.title, moving ? bytesPerSecond(edge.rate) : "");
}
