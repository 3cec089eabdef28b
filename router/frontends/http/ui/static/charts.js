// Lines over the last minutes. One pointer moves through all charts together; arrow keys do the same.

import { el, say, set, svg } from "./dom.js";
import { number, seconds } from "./format.js";

const HEIGHT = 190;
const MARGIN = { left: 54, right: 10, top: 10, bottom: 26 };

const CHARTS = [
  { title: "Time to first token", unit: "of the last 10 s", format: seconds,
    lines: [["ttft_p50", "p50", "s0"], ["ttft_p99", "p99", "s1"]], band: ["ttft_p50", "ttft_p99"] },
  { title: "Between tokens", unit: "of the last 10 s", format: seconds,
    lines: [["itl_p50", "p50", "s0"], ["itl_p99", "p99", "s1"]], band: ["itl_p50", "itl_p99"] },
  { title: "Tokens", unit: "per second", format: number,
    lines: [["output_tokens_per_second", "output", "s0"], ["prompt_tokens_per_second", "prompts", "s1"]] },
  { title: "Requests", unit: "per second", format: number,
    lines: [["requests_per_second", "ended", "s0"], ["failed_per_second", "failed", "bad"]] },
];

export function makeCharts(parent) {
  let history = null;
  let pointed = null; // index into the history, or null: the newest
  const charts = CHARTS.map((description) => makeChart(parent, description, (index) => {
    pointed = index;
    draw();
  }));
  const draw = () => history && charts.forEach((chart) => chart(history, pointed));
  new ResizeObserver(draw).observe(parent);
  return (live) => {
    history = live.history;
    draw();
  };
}

function makeChart(parent, { title, unit, format, lines, band }, point) {
  const values = lines.map(() => el("b", {}, "–"));
  const legend = el("p", { class: "legend" }, ...lines.map(([, name, css], index) =>
    el("span", { class: `k ${css}` }, `${name} `, values[index])));
  const when = el("span", { class: "soft" }, unit);
  const paths = lines.map(([, , css]) => svg("path", { class: `line ${css}` }));
  const shade = svg("path", { class: "band" });
  const grid = svg("g");
  const cross = svg("line", { class: "cross", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const picture = svg("svg", { role: "img", tabindex: 0, height: HEIGHT }, grid, shade, ...paths, cross);
  const heading = el("div", { class: "head" }, el("h2", {}, title, " ", when), legend);
  const holder = el("div");
  holder.append(picture);
  parent.append(el("section", { class: "card chart" }, heading, holder));
  const scale = { x: (index) => index, index: () => null };
  listen(picture, scale, point);

  return (history, pointed) => {
    const columns = Object.fromEntries(lines.map(([name]) => [name, history[name]]));
    const count = history[lines[0][0]].length;
    const width = Math.max(200, holder.clientWidth);
    const slots = Math.max(30, count); // at least a minute, so that the first points do not fill the width
    const [left, right] = [MARGIN.left, width - MARGIN.right];
    scale.x = (index) => left + ((index + slots - count) / (slots - 1)) * (right - left);
    scale.index = (x) => Math.max(0, Math.min(count - 1, Math.round(((x - left) / (right - left)) * (slots - 1)) - slots + count));
    scale.count = count;
    const ticks = ticksUpTo(Math.max(0, ...Object.values(columns).flat().map((value) => value ?? 0)));
    const top = ticks.at(-1);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.bottom - MARGIN.top);
    set(picture, { viewBox: `0 0 ${width} ${HEIGHT}` });
    grid.replaceChildren(...gridLines(ticks, y, left, right, format), ...timeMarks(slots, history.interval_seconds, left, right));
    lines.forEach(([name], index) => set(paths[index], { d: path(columns[name], scale.x, y) }));
    set(shade, { d: band ? area(columns[band[0]], columns[band[1]], scale.x, y) : "" });
    const at = pointed === null ? count - 1 : Math.min(pointed, count - 1);
    set(cross, { x1: scale.x(at), x2: scale.x(at), visibility: pointed === null || count === 0 ? "hidden" : null });
    lines.forEach(([name], index) => say(values[index], format(columns[name][at])));
    say(when, pointed === null ? unit : `${Math.round((count - 1 - at) * history.interval_seconds)} s ago`);
    const now = lines.map(([name, word]) => `${word} ${format(columns[name].at(-1))}`).join(", ");
    set(picture, { "aria-label": `${title}, ${unit}: now ${now}` });
  };
}

function listen(picture, scale, point) {
  let at = null;
  const move = (index) => {
    at = index;
    point(index);
  };
  picture.addEventListener("pointermove", (event) => scale.count && move(scale.index(event.offsetX)));
  picture.addEventListener("pointerleave", () => move(null));
  picture.addEventListener("blur", () => move(null));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !scale.count) return;
    event.preventDefault();
    move(Math.max(0, Math.min(scale.count - 1, (at ?? scale.count) + step)));
  });
}

/** From zero to a round number at or above `most`, in three to five steps. */
function ticksUpTo(most) {
  if (!(most > 0)) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size * 4 >= most * 0.999);
  return Array.from({ length: Math.ceil(most / step - 0.001) + 1 }, (_, index) => index * step);
}

function gridLines(ticks, y, left, right, format) {
  return ticks.flatMap((value) => [
    svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, value === 0 ? "0" : format(value)),
  ]);
}

function timeMarks(slots, interval, left, right) {
  const whole = (slots - 1) * interval;
  const step = whole > 150 ? 60 : 20;
  const marks = [];
  for (let ago = 0; ago <= whole; ago += step) {
    const x = right - (ago / whole) * (right - left);
    const word = ago === 0 ? "now" : step === 60 ? `−${ago / 60} min` : `−${ago} s`;
    const anchor = ago === 0 ? "end" : x - left < 24 ? "start" : "middle";
    marks.push(svg("text", { class: "tick", x, y: HEIGHT - 6, "text-anchor": anchor }, word));
  }
  return marks;
}

/** Broken where nothing is known; a value alone between gaps is a dot. */
function path(values, x, y) {
  let drawn = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const starts = index === 0 || values[index - 1] === null;
    const ends = index === values.length - 1 || values[index + 1] === null;
    drawn += `${starts ? "M" : "L"}${x(index).toFixed(1)},${y(value).toFixed(1)}${starts && ends ? "h0" : ""}`;
  });
  return drawn;
}

function area(low, high, x, y) {
  let drawn = "";
  for (let start = 0; start < low.length; start += 1) {
    if (low[start] === null || high[start] === null) continue;
    let end = start;
    while (end + 1 < low.length && low[end + 1] !== null && high[end + 1] !== null) end += 1;
    const corner = (values, index) => `${x(index).toFixed(1)},${y(values[index]).toFixed(1)}`;
    const along = Array.from({ length: end - start + 1 }, (_, offset) => start + offset);
    const there = along.map((index) => corner(high, index));
    const back = along.reverse().map((index) => corner(low, index));
    drawn += `M${[...there, ...back].join("L")}Z`;
    start = end;
  }
  return drawn;
}
