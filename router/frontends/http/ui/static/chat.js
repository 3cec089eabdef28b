// The playground: a conversation with the model. What it says is text and stays text.

import { streamChat } from "./api.js";
import { byId, el } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { waterfall } from "./waterfall.js";

const IDEAS = ["Write a Python function `is_prime`.", "What does `os.path.join` do?", "Write a class `Counter`."];
const NEAR_END = 48; // pixels: who has scrolled further up is reading, and is not moved

export function makeChat() {
  const chat = { model: "", messages: [], stop: null };
  const box = byId("messages");
  const question = byId("question");
  showIdeas(box, (idea) => ask(chat, idea));
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(chat, question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => chat.stop?.abort());
  byId("clear").addEventListener("click", () => {
    chat.stop?.abort();
    chat.messages = [];
    byId("clear").hidden = true;
    box.replaceChildren();
    showIdeas(box, (idea) => ask(chat, idea));
    question.focus();
  });
  return chat;
}

function showIdeas(box, choose) {
  const ideas = IDEAS.map((idea) => {
    const button = el("button", { type: "button", class: "idea" }, idea);
    button.addEventListener("click", () => choose(idea));
    return button;
  });
  box.append(el("div", { class: "ideas" }, el("p", { class: "soft" }, "Try one of these, or write your own."), ...ideas));
}

async function ask(chat, text) {
  if (!text || chat.stop) return;
  const box = byId("messages");
  box.querySelector(".ideas")?.remove();
  byId("question").value = "";
  box.append(el("div", { class: "message user" }, el("p", { class: "text" }, text)));
  const turn = makeTurn(box);
  const messages = chat.messages;
  messages.push({ role: "user", content: text });
  chat.stop = new AbortController();
  busy(true);
  try {
    await read(chat, turn, messages);
  } catch (error) {
    if (chat.stop.signal.aborted) turn.note("stopped");
    else turn.fail(error.message);
  }
  // An answer that was stopped stays in the conversation as far as it came; one that did not begin takes its question along.
  if (turn.answer.textContent) messages.push({ role: "assistant", content: turn.answer.textContent });
  else messages.pop();
  chat.stop = null;
  busy(false);
}

function makeTurn(box) {
  const answer = el("p", { class: "text" });
  const reasoning = el("p", { class: "facts" });
  const element = el("div", { class: "message model waiting" }, answer);
  const follow = () => {
    if (box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END + 24) box.scrollTop = box.scrollHeight;
  };
  const add = (...children) => {
    element.classList.remove("waiting");
    element.append(...children);
    follow();
  };
  box.append(element);
  box.scrollTop = box.scrollHeight;
  return {
    answer,
    text: (more) => {
      element.classList.remove("waiting");
      answer.append(more); // a string: becomes text, whatever it holds
      follow();
    },
    reasoning: (more) => {
      element.classList.remove("waiting");
      if (!reasoning.isConnected) element.prepend(reasoning);
      reasoning.append(more);
      follow();
    },
    add,
    note: (words) => add(el("p", { class: "facts" }, words)),
    fail: (words) => add(el("p", { class: "facts wrong", role: "alert" }, words)),
  };
}

async function read(chat, turn, messages) {
  const asked = performance.now();
  let first = null;
  const body = {
    model: chat.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
  };
  let timings = null;
  let usage = null;
  for await (const event of streamChat(body, chat.stop.signal)) {
    const delta = event.choices[0]?.delta ?? {};
    const piece = delta.content;
    if (delta.reasoning_content) {
      first ??= performance.now();
      turn.reasoning(delta.reasoning_content);
    }
    if (piece) {
      first ??= performance.now();
      turn.text(piece);
    }
    timings = event.baton ?? timings; // on the chunk that ends the answer,
    usage = event.usage ?? usage; // and the usage on one of its own, after it
  }
  if (usage) turn.add(el("p", { class: "facts" }, facts(usage, first && (first - asked) / 1e3, (performance.now() - asked) / 1e3)));
  if (timings) turn.add(waterfall(timings));
}

function facts(usage, firstSeconds, wholeSeconds) {
  const said = [`${count(usage.completion_tokens)} tokens`];
  if (firstSeconds !== null) {
    said.push(`first after ${seconds(firstSeconds)}`);
    const rest = wholeSeconds - firstSeconds;
    if (usage.completion_tokens > 1 && rest > 0) said.push(`${number((usage.completion_tokens - 1) / rest)} tokens/s`);
  }
  const cached = usage.prompt_tokens_details.cached_tokens;
  said.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
  return said.join(" · ");
}

function busy(yes) {
  byId("send").hidden = yes;
  byId("stop").hidden = !yes;
  byId("clear").hidden = false;
  // Only what has just been hidden hands its focus on: whoever is elsewhere on the page stays there.
  if (document.activeElement === document.body) byId(yes ? "stop" : "question").focus({ preventScroll: true });
}
