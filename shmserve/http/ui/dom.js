// Elements made by hand. Text goes in as text (textContent): nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id, which must be there. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page lacks #${id}`);
  return found;
}

/** A new element: `make("p", { class: "hint", text: "hello", title: "…" }, child, …)`. */
export function make(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children);
}

export function makeSvg(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

function fill(element, { text, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** Write `text` only if it changed: an untouched node costs no layout and is not announced again. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
