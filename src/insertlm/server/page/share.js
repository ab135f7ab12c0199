// Requests as something to take along: a command, a few lines of Python, an address of this page.

import { hasKey } from "./api.js";

const MARK = "#text?"; // what stands behind it is a request as JSON

export function asCurl(body) {
  const key = hasKey() ? ` -H "Authorization: Bearer $INSERTLM_API_KEY"` : "";
  const quoted = JSON.stringify(body).replaceAll("'", `'\\''`);
  return `curl -s ${endpoint()} -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

export function asPython(body) {
  const fields = Object.entries(body).map(([name, value]) => `    ${JSON.stringify(name)}: ${literal(value)},\n`);
  const lines = [
    ...(hasKey() ? ["import os", ""] : []),
    "import httpx",
    "",
    `body = {\n${fields.join("")}}`,
    ...(hasKey() ? [`headers = {"Authorization": f"Bearer {os.environ['INSERTLM_API_KEY']}"}`] : []),
    `answer = httpx.post("${endpoint()}", json=body${hasKey() ? ", headers=headers" : ""}, timeout=60).json()`,
    body.samples ? `print(*[sample["text"] for sample in answer["samples"]], sep="\\n\\n")` : `print(answer["text"])`,
    "",
  ];
  return lines.join("\n");
}

export function asLink(body) {
  return `${location.origin}${location.pathname}${MARK}${encodeURIComponent(JSON.stringify(body))}`;
}

/** The request that the page's address holds, or null. */
export function fromLink() {
  if (!location.hash.startsWith(MARK)) return null;
  try {
    const body = JSON.parse(decodeURIComponent(location.hash.slice(MARK.length)));
    return typeof body?.text === "string" ? body : null;
  } catch {
    return null; // an address that was cut off
  }
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // the clipboard is closed to pages that come without encryption from another machine
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const helper = document.createElement("textarea");
  helper.value = text;
  document.body.append(helper);
  helper.select();
  document.execCommand("copy");
  helper.remove();
  focused?.focus();
}

function endpoint() {
  return new URL("v1/infill", location.href.replace(/#.*/, "")).href;
}

/** JSON is Python but for these three words. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  return { null: "None", true: "True", false: "False" }[value] ?? JSON.stringify(value);
}
