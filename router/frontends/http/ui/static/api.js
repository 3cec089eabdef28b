// The router's API. The key lives in this module's memory and nowhere else.

let key = "";

export function useKey(value) {
  key = value.trim();
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: nobody answered
  }
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(response) {
  let message = `the router answers with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not one of the router's own errors: somebody stands between.
  }
  return new ApiError(response.status, message);
}

export async function get(path) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(5000) });
  } catch {
    throw new ApiError(0, "the router does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Server-sent events of an answer, as objects, until its end. `signal` stops it. */
export async function* streamChat(body, signal) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ApiError(0, "the router does not answer");
  }
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error.message);
    yield event;
  }
  throw new ApiError(0, "the answer broke off");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
