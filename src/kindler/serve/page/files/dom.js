// Small tools for building the page. Text becomes text nodes, always: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";
const WORDS = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const UNITS = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60]];

function filled(node, classes, parts) {
  const props = parts[0]?.constructor === Object ? parts.shift() : {};
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (["value", "selected"].includes(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...parts.flat(Infinity).filter((part) => part != null));
  return node;
}

/** An HTML element: `h("p.note.wide", {title: "why"}, "text", child)`; the properties may be left out. */
export function h(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElement(name), classes, parts);
}

/** An SVG element. */
export function s(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElementNS(SVG, name), classes, parts);
}

/** A card with a heading. */
export const card = (title, kind, ...children) => h(`section.card${kind}`, h("h2", title), children);

/** A table; a column is `[heading, class]` or a heading. Wide ones scroll by themselves, not with the page. */
export function table(label, columns, rows) {
  const heads = columns.map((column) => [column].flat());
  return h("div.scroll", { role: "region", "aria-label": label, tabindex: "0" },
    h("table",
      h("thead", h("tr", heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
      h("tbody", rows.map((cells) => h("tr",
        cells.map((cell, i) => h("td", { class: heads[i]?.[1] }, cell)))))));
}

/** The way back to a list, a heading with what stands beside it, and a line of facts. */
export const about = (bucket, shelf, name, beside, facts) => [
  h("nav.crumbs", { "aria-label": "Where you are" }, h("a", { href: `#/b/${bucket}/${shelf.toLowerCase()}` }, shelf)),
  h("div.head", h("h1.name", name), beside),
  h("dl.facts", facts.map(([term, value, kind]) => h("div", { class: kind }, h("dt", term), h("dd", value)))),
];

export const chip = (tag) => h("span.chip", tag);

/** Says something that happened, also to screen readers. */
export function toast(text) {
  const node = document.getElementById("toast");
  node.textContent = text;
  node.className = "toast shown";
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { node.className = "toast"; }, 5000);
}

export function size(bytes) {
  if (bytes == null) return "";
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < 4) { value /= 1024; unit += 1; }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export const count = (value) => (value == null ? "" : value.toLocaleString("en"));

/** A number, short: six digits that count. */
export function short(value) {
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const text = String(value);
  return text.length <= 8 ? text : String(Number(value.toPrecision(6)));
}

export function milliseconds(value) {
  if (value == null) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

/** How long ago something was; the exact time on hover. */
export function when(iso) {
  const date = new Date(iso);
  const seconds = (Date.now() - date) / 1000;
  const [unit, length] = UNITS.find((one) => seconds >= one[1]) ?? ["second", 1];
  const text = seconds < 10 ? "just now" : WORDS.format(-Math.floor(seconds / length), unit);
  return h("time", { datetime: iso, title: date.toLocaleString() }, text);
}

/** One value of a table, exact on hover. */
export function cell(value) {
  if (value == null) return h("span.none", "null");
  if (["number", "bigint"].includes(typeof value)) return h("span.number", { title: String(value) }, short(value));
  const text = typeof value === "string" ? value : written(value);
  const shown = text.length > 120 ? `${text.slice(0, 120)}…` : text;
  return h("span.text", { title: shown === text ? null : text.slice(0, 2000) }, shown);
}

/** JSON of a value that may have integers beyond JavaScript's numbers. */
export const written = (value, indent) => JSON.stringify(value,
  (_, part) => (typeof part === "bigint" ? String(part) : part), indent);
