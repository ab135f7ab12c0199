// The bubble that says how likely a token was. One for the page.

const tip = document.querySelector("#tip");
const LINGER = 120; // ms in which the pointer can move from the token to the bubble
let owner = null;
let leaving = 0;

export function showTip(element, cell, total) {
  clearTimeout(leaving);
  owner?.removeAttribute("aria-describedby");
  owner = element;
  const { probability, stop_probability: stop } = cell.event;
  tip.replaceChildren(
    line("order", `${cell.number + 1} of ${total}`),
    line("probability", percent(probability)),
    ...(stop === null || stop === undefined ? [] : [line("chance to stop", percent(stop))]),
  );
  tip.hidden = false;
  element.setAttribute("aria-describedby", tip.id);
  place(element.getClientRects()[0]);
}

export function hideTip(event) {
  clearTimeout(leaving);
  if (event?.type === "pointerleave") {
    // A token that has the keyboard's focus keeps its bubble.
    leaving = setTimeout(() => owner !== document.activeElement && hideTip(), LINGER);
    return;
  }
  tip.hidden = true;
  owner?.removeAttribute("aria-describedby");
  owner = null;
}

/** After the text has moved: the bubble stays with its token. */
export function keepTip() {
  const box = owner?.getClientRects()[0];
  if (box) place(box);
  else hideTip();
}

function place(box) {
  const { clientWidth: page } = document.documentElement;
  const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 8), page - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above < 0 ? box.bottom + 6 : above) + scrollY}px`;
}

function line(name, value) {
  const row = document.createElement("div");
  const label = document.createElement("span");
  label.textContent = name;
  row.append(label, " ", value);
  return row;
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0.0995 && share < 0.9995 ? 0 : 1)} %`;
}

tip.addEventListener("pointerenter", () => clearTimeout(leaving));
tip.addEventListener("pointerleave", hideTip);
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
