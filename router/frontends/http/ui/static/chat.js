// The playground: a conversation with the model. What it says is text and stays text.

import { streamChat } from "./api.js";
import { byId, el } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { askForResult, makeTurn } from "./turn.js";
import { waterfall } from "./waterfall.js";

const IDEAS = ["Write a Python function `is_prime`.", "What does `os.path.join` do?", "Write a class `Counter`."];

export function makeChat() {
  const chat = { model: "", messages: [], calls: [], stop: null };
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
  byId("model-choice").addEventListener("change", (event) => {
    chat.model = event.target.value;
  });
  byId("stop").addEventListener("click", () => chat.stop?.abort());
  byId("clear").addEventListener("click", () => {
    chat.stop?.abort();
    chat.messages = [];
    chat.calls = [];
    byId("clear").hidden = true;
    box.replaceChildren();
    showIdeas(box, (idea) => ask(chat, idea));
    question.focus();
  });
  return chat;
}

/** Lets the reader choose among those that generate: models, and adapters of them. */
export function offerModels(chat, models) {
  const names = models.filter((one) => one.generation !== false).map((one) => one.id);
  chat.model = names[0] ?? models[0].id;
  byId("model-choice").replaceChildren(...names.map((name) => el("option", {}, name)));
  byId("models").hidden = names.length < 2;
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
  if ((!text && !chat.calls.length) || chat.stop) return;
  const box = byId("messages");
  const messages = chat.messages;
  const before = messages.length;
  for (const call of chat.calls) messages.push({ role: "tool", tool_call_id: call.id, content: call.result.value });
  box.querySelector(".ideas")?.remove();
  byId("question").value = "";
  if (text) {
    messages.push({ role: "user", content: text });
    box.append(el("div", { class: "message user" }, el("p", { class: "text" }, text)));
  }
  const turn = makeTurn(box);
  let ended = false;
  chat.stop = new AbortController();
  busy(true);
  try {
    await read(chat, turn);
    ended = true;
  } catch (error) {
    turn.reasoned();
    if (chat.stop.signal.aborted) turn.note("stopped");
    else turn.fail(error.message);
  }
  keepAnswer(chat, turn, before, ended);
  chat.stop = null;
  busy(false);
}

/**
 * An answer that was stopped stays in the conversation as far as its text came, without its calls; one that has
 * nothing to stay takes along what it was an answer to.
 */
function keepAnswer(chat, turn, before, ended) {
  const calls = ended ? turn.calls.filter(Boolean) : [];
  const content = turn.answer.textContent;
  if (!chat.messages.length) return; // cleared meanwhile
  if (!content && !calls.length) {
    chat.messages.length = before;
    return;
  }
  for (const call of chat.calls) call.result.disabled = true;
  const answer = { role: "assistant", content: content || null };
  if (calls.length) answer.tool_calls = calls.map(asMessage);
  chat.messages.push(answer);
  chat.calls = calls;
  calls.forEach(askForResult);
}

function asMessage(call) {
  const [name, text] = [call.name.textContent, call.arguments.textContent];
  return { id: call.id, type: "function", function: { name, arguments: text } };
}

/** The request's fields about tools. Raises SyntaxError for what is no JSON. */
function toolFields() {
  const text = byId("tools").value.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text), tool_choice: byId("tool-choice").value };
  } catch (error) {
    throw new SyntaxError(`tools: ${error.message}`);
  }
}

async function read(chat, turn) {
  const asked = performance.now();
  let first = null;
  const body = {
    model: chat.model,
    messages: chat.messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    ...toolFields(),
  };
  let timings = null;
  let usage = null;
  for await (const event of streamChat(body, chat.stop.signal)) {
    if (show(turn, event.choices[0]?.delta ?? {})) first ??= performance.now();
    timings = event.baton ?? timings; // on the chunk that ends the answer,
    usage = event.usage ?? usage; // and the usage on one of its own, after it
  }
  turn.reasoned(usage?.completion_tokens_details?.reasoning_tokens);
  if (usage) turn.add(el("p", { class: "facts" }, facts(usage, first && (first - asked) / 1e3, (performance.now() - asked) / 1e3)));
  if (timings) turn.add(waterfall(timings));
}

/** Whether there was something to show. */
function show(turn, delta) {
  const calls = delta.tool_calls ?? [];
  if (delta.reasoning_content) turn.reasoning(delta.reasoning_content);
  if (delta.content) turn.text(delta.content);
  calls.forEach(turn.call);
  return Boolean(delta.reasoning_content || delta.content || calls.length);
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
