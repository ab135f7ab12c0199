// Talking to the server: JSON, and server-sent events as they come.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const LOST = "The connection to the server was lost.";
const UNREACHABLE = "The server cannot be reached.";

let key = ""; // kept in memory alone: gone with the page

export function useKey(value) {
  key = value;
}

export function hasKey() {
  return key !== "";
}

export async function getJson(path) {
  const response = await send(path, {});
  return response.json();
}

/** Yields [name, data] for every event of the answer; throws a ServerError if it does not end with `done`. */
export async function* postEvents(path, body, signal) {
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  const request = { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await send(path, request);
  for await (const [name, data] of messages(response)) {
    if (name === "error") throw new ServerError(oneLine(data.error?.message));
    yield [name, data];
    if (name === "done") return;
  }
  throw new ServerError(LOST);
}

async function send(path, request) {
  const headers = { ...request.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...request, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(UNREACHABLE);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(oneLine(answer?.error?.message ?? `The server answered ${response.status}.`), response.status);
}

async function* messages(response) {
  let text = "";
  for await (const chunk of chunks(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const blocks = (text + chunk).split(/\r?\n\r?\n/);
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/);
      const field = (name) =>
        lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1));
      const data = field("data").join("\n");
      if (data) yield [field("event").join("").trim(), JSON.parse(data)];
    }
  }
}

async function* chunks(reader) {
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(LOST);
  } finally {
    reader.cancel().catch(() => {}); // nobody reads on
  }
}

function oneLine(message) {
  return String(message ?? "Something failed on the server.")
    .replace(/\s+/g, " ")
    .trim();
}
