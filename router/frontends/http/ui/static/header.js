// The line at the top: which model, how the cluster is, the API key; and the notice below it when something is wrong.

import { byId, say, set } from "./dom.js";

const WELL = ["good", "live"];

/** How a cluster is, in one word and its colour. */
export function stateOf(live) {
  if (!live.redis.ok) return ["warn", "Redis gone"];
  const gone = live.routers.filter((router) => router.state === "gone").length;
  const bad = live.workers.filter((worker) => worker.state === "suspect" || worker.state === "dead").length;
  const serving = (role) => live.workers.some((worker) => worker.role === role && worker.state === "ready");
  if (!serving("decode")) return ["bad", "no decode worker"];
  if (bad) return ["warn", bad === 1 ? "1 worker lost" : `${bad} workers lost`];
  if (gone) return ["warn", gone === 1 ? "1 router gone" : `${gone} routers gone`];
  const draining = [...live.workers, ...live.routers].filter((one) => one.state === "draining").length;
  return draining ? ["warn", `${draining} draining`] : WELL;
}

export function makeHeader() {
  return {
    model: (name) => say(byId("model"), name),
    state: ([css, word]) => {
      set(byId("state"), { class: `pill ${css}` });
      say(byId("state"), word);
    },
    notice: (text) => {
      byId("notice").hidden = !text;
      say(byId("notice"), text);
    },
  };
}

/** What to tell people about a refused look at the cluster. */
export function explain(error) {
  if (error.status === 401) return "This router asks for an API key. Enter one above; live figures need an admin's.";
  if (error.status === 403) return "This key may chat, but live figures need a key with admin: true.";
  return `No live figures: ${error.message}. Trying again.`;
}
