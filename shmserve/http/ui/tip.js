// The one little label beside whatever is pointed at or focused; its text is the element's data-told.

import { make } from "./dom.js";

const tip = make("div", { class: "tip", id: "tip", role: "tooltip", hidden: "" });
document.body.append(tip);
let target = null;

/** Show the label of `element`, or none. */
export function pointOut(element) {
  if (target !== null) target.removeAttribute("aria-describedby");
  target = element;
  tip.hidden = element === null;
  if (element === null) return;
  tip.textContent = element.dataset.told ?? "";
  element.setAttribute("aria-describedby", "tip");
  const box = element.getClientRects()[0];
  if (box === undefined) return;
  const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
}

// What is focused keeps its label while the answer moves under it; what was pointed at does not.
addEventListener("scroll", () => pointOut(target === document.activeElement ? target : null), { capture: true, passive: true });
