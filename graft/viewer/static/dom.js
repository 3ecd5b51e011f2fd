// Small help with the document. Everything a run says becomes text nodes: markup in it stays letters.

const SVG = "http://www.w3.org/2000/svg";

/** make("a", {class: "x", href: "#", on: {click: f}}, "text", child) */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    } else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** <label>words <select>...</select></label>; choices are values or [value, words] */
export function choice(words, choices, chosen, act, name = "") {
  const options = choices.map((one) => {
    const [value, text] = Array.isArray(one) ? one : [one, one];
    return make("option", { value, selected: String(value) === String(chosen) }, String(text));
  });
  const select = make("select", { name, on: { change: () => act(select.value) } }, ...options);
  return make("label", {}, `${words} `, select);
}

export function button(words, act, attributes = {}) {
  return make("button", { type: "button", ...attributes, on: { click: act } }, words);
}

/** A mark in the colour of a run. */
export function dotOf(colour, kind = "") {
  const dot = make("span", { class: `dot ${kind}` });
  dot.style.backgroundColor = colour;
  return dot;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(digits - 1)
    : String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))));
}

// control characters and those that turn the direction of text: shown by name, never obeyed
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** A text with its unseen characters made visible; newlines get a mark if `marked`. */
export function visible(text, marked = false) {
  let shown = text.replace(UNSEEN, (one) => {
    const code = one.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
  if (marked) shown = shown.replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u2192\t");
  return shown;
}

/** The same for one line of a table or a label. */
export function oneLine(text) {
  return visible(text.replace(/\n/g, "\u23ce").replace(/\t/g, " "));
}

const tip = document.getElementById("tip");

/** Show lines of [name, value] beside a point of the window. */
export function showTip(x, y, rows, heading = "") {
  const lines = rows.map(([name, value]) =>
    make("div", { class: "row" }, make("span", {}, name), make("b", {}, String(value))),
  );
  tip.replaceChildren(...(heading ? [make("div", { class: "heading" }, heading)] : []), ...lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - box.width - 10 : x + 14;
  const top = y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
