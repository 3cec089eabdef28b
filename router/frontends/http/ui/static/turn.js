// What the page shows of one answer: reasoning, folded; text; calls with their arguments; and facts about it.

import { el } from "./dom.js";

const NEAR_END = 72; // pixels: a reader who has scrolled further up is not moved

/** An empty answer at the end of `box`. */
export function makeTurn(box) {
  const answer = el("p", { class: "text" });
  const element = el("div", { class: "message model waiting" }, answer);
  const follow = () => {
    if (box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END) box.scrollTop = box.scrollHeight;
  };
  const shown = (change) => {
    element.classList.remove("waiting");
    change();
    follow();
  };
  const add = (...children) => shown(() => element.append(...children));
  box.append(element);
  box.scrollTop = box.scrollHeight;
  const reasoning = makeReasoning();
  const calls = [];
  return {
    answer,
    calls,
    text: (more) => shown(() => answer.append(more)), // a string: becomes text, whatever it holds
    reasoning: (more) => shown(() => reasoning.add(element, more)),
    call: (delta) => shown(() => addToCall(element, calls, delta)),
    reasoned: (tokens) => reasoning.end(tokens),
    add,
    note: (words) => add(el("p", { class: "facts" }, words)),
    fail: (words) => add(el("p", { class: "facts wrong", role: "alert" }, words)),
  };
}

function makeReasoning() {
  const text = el("p", { class: "text" });
  const title = el("summary", {}, "Reasoning …");
  const fold = el("details", { class: "reasoning" }, title, text);
  return {
    add: (element, more) => {
      if (!fold.isConnected) element.prepend(fold);
      text.append(more);
    },
    end: (tokens) => {
      title.textContent = tokens ? `Reasoning, ${tokens} tokens` : "Reasoning";
    },
  };
}

/** `delta`: one of a chunk's `tool_calls`; the first of a call has its id and name. */
function addToCall(element, calls, delta) {
  calls[delta.index] ??= makeCall(element);
  const call = calls[delta.index];
  if (delta.id) call.id = delta.id;
  call.name.append(delta.function?.name ?? "");
  call.arguments.append(delta.function?.arguments ?? "");
}

function makeCall(element) {
  const name = el("span", { class: "name" });
  const text = el("p", { class: "text arguments" });
  const part = el("div", { class: "call" }, el("p", { class: "soft" }, "Call of ", name), text);
  element.append(part);
  return { id: "", name, arguments: text, part };
}

/** A field for a call's result; the next message takes it along. */
export function askForResult(call) {
  call.result = el("input", {
    type: "text",
    form: "ask", // Enter sends the message
    maxlength: 100000,
    autocomplete: "off",
    "aria-label": `Result of ${call.name.textContent}`,
    placeholder: "Its result, sent with the next message",
  });
  call.part.append(call.result);
}
