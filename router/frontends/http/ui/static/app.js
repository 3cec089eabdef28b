// The page: asks for the live view every second and hands it to its parts.

import { get, useKey } from "./api.js";
import { makeCharts } from "./charts.js";
import { makeChat, offerModels } from "./chat.js";
import { byId } from "./dom.js";
import { explain, makeHeader, stateOf } from "./header.js";
import { makeTiles } from "./tiles.js";
import { makeTopology } from "./topology.js";
import { makeWorkers } from "./workers.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;

const header = makeHeader();
const parts = [
  makeTiles(byId("tiles")),
  makeTopology(byId("topology")),
  makeCharts(byId("charts")),
  makeWorkers(byId("workers")),
];
const chat = makeChat();
let timer = 0;
let asking = false;
let again = false;

async function look() {
  clearTimeout(timer);
  again = asking; // what is on its way was asked with the key of before
  if (asking || document.hidden) return; // a hidden page is not looked at
  asking = true;
  let wait = POLL_MS;
  try {
    const live = await get("v1/cluster/live");
    if (!chat.model) await learnModel();
    header.notice("");
    header.state(stateOf(live));
    for (const show of parts) show(live);
  } catch (error) {
    header.notice(explain(error));
    header.state(error.status === 0 ? ["bad", "router unreachable"] : ["warn", "key needed"]);
    // A key that is not enough stays so: asking again waits until it changes.
    wait = error.status === 401 || error.status === 403 ? 0 : RETRY_MS;
    if (error.status === 403 && !chat.model) await learnModel().catch(() => {});
  } finally {
    asking = false;
  }
  if (again) look();
  else if (wait) timer = setTimeout(look, wait);
}

async function learnModel() {
  const models = (await get("v1/models")).data;
  if (!models.length) return; // those that the key names are away
  header.model(models[0].id);
  offerModels(chat, models);
}

byId("key").addEventListener("change", (event) => {
  useKey(event.target.value);
  chat.model = "";
  look();
});
document.addEventListener("visibilitychange", look);
look();
