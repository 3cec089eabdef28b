// Elements, made and filled as text: nothing in this page turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An HTML element. `attributes` with the value null or false are left out; children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  set(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes only what has changed: an animation starts again when its attributes are written. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const wanted = value === null || value === false || value === undefined ? null : String(value);
    if (element.getAttribute(name) === wanted) continue;
    if (wanted === null) element.removeAttribute(name);
    else element.setAttribute(name, wanted);
  }
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Keeps one element for each item: makes those that are new, updates all, removes those whose item is gone.
 * `kept` is a Map by key that belongs to the caller.
 */
export function keep(parent, kept, items, keyOf, make, update) {
  const seen = new Set();
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    if (!kept.has(key)) {
      kept.set(key, make(item));
      parent.append(kept.get(key).element);
    }
    update(kept.get(key), item);
  }
  for (const [key, one] of kept) {
    if (seen.has(key)) continue;
    one.element.remove();
    kept.delete(key);
  }
}
