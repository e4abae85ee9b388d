// Line charts in SVG: axes with ticks, a legend, and the values under the pointer or the arrow keys.

import { h, s, short } from "./dom.js";

const LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 24;

/** Round numbers that cover a range, at most about `most` of them. */
export function ticks(low, high, most) {
  if (!(high > low)) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let i = Math.floor(low / step + 1e-9); i * step < high + step * 0.999; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/**
 * A chart of `{x: [...], xName, series: [{name, values, second}]}`; null values are gaps.
 * `update` draws other data; a `second` series is drawn beside the first, dashed.
 */
export function lineChart(label, options) {
  const { height = 180, zero = false, latest = true, format = short, tick = format, xFormat = short,
    gap = "No values yet." } = options;
  const svg = s("svg.plot", { role: "img", tabindex: "0", height });
  const legend = h("figcaption.legend");
  const said = h("span.hidden", { "aria-live": "polite" });
  const figure = h("figure.chart", legend, svg, said);
  let data = { x: [], series: [] }, scale = null, at = null, shown = [];

  function draw() {
    const width = svg.clientWidth;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const values = data.series.flatMap((one) => one.values).filter(Number.isFinite);
    svg.setAttribute("aria-label", described(label, data, format));
    if (!values.length) {
      svg.append(s("text", { x: width / 2, y: height / 2, class: "gap" }, gap));
      scale = null;
      return;
    }
    const bottom = zero ? 0 : Math.min(...values);
    const yTicks = ticks(bottom, Math.max(...values), Math.floor((height - TOP - BOTTOM) / 34));
    const [low, high] = [yTicks[0], yTicks.at(-1)];
    const [first, last] = [data.x[0], data.x.at(-1)];
    const px = (x) => LEFT + (last > first ? (x - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
    const py = (y) => height - BOTTOM - ((y - low) / (high - low)) * (height - TOP - BOTTOM);
    scale = { px, py, width };
    for (const y of yTicks) {
      svg.append(s("line.grid", { x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }),
        s("text.tick.y", { x: LEFT - 6, y: py(y) + 4 }, tick(y)));
    }
    const whole = data.x.every(Number.isInteger);
    const xTicks = ticks(first, last, Math.floor((width - LEFT - RIGHT) / 70))
      .filter((x) => x >= first && x <= last && (!whole || Number.isInteger(x)));
    for (const x of last > first ? xTicks : [first]) {
      svg.append(s("text.tick.x", { x: px(x), y: height - BOTTOM + 16 }, xFormat(x)));
    }
    for (const one of data.series) {
      const kind = one.second ? "second" : "first";
      svg.append(s(`path.curve.${kind}`, { d: path(data.x, one.values, px, py) }));
      one.values.forEach((y, i) => {
        const alone = !Number.isFinite(one.values[i - 1]) && !Number.isFinite(one.values[i + 1]);
        if (!Number.isFinite(y) || (!alone && data.x.length > 40)) return;
        svg.append(s(`circle.dot.${kind}`, { cx: px(data.x[i]), cy: py(y), r: 2 }));
      });
    }
    svg.append(s("line.cursor", { y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 }));
    point(at, false);
  }

  function point(index, aloud = true) {
    at = index !== null && index < data.x.length ? index : null;
    const cursor = svg.querySelector(".cursor");
    if (!cursor || !scale) return;
    const x = at === null ? -9 : scale.px(data.x[at]);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const texts = data.series.map((one) => {
      const value = at === null ? one.values.findLast(Number.isFinite) : one.values[at];
      if (at === null && !latest) return ""; // the last one says no more than others
      return Number.isFinite(value) ? format(value) : "–";
    });
    shown.forEach((node, i) => { node.textContent = texts[i]; });
    const where = at === null ? "" : `${data.xName} ${xFormat(data.x[at])}`;
    legend.lastChild.textContent = where;
    if (aloud && where) said.textContent = `${where}: ${data.series.map((one, i) => `${one.name} ${texts[i]}`).join(", ")}`;
  }

  svg.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const x = event.clientX - svg.getBoundingClientRect().left;
    const far = data.x.map((value) => Math.abs(scale.px(value) - x));
    point(far.indexOf(Math.min(...far)), false);
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const last = data.x.length - 1;
    const to = { ArrowLeft: Math.max(0, (at ?? last + 1) - 1), ArrowRight: Math.min(last, (at ?? -1) + 1) }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    point(to);
  });
  new ResizeObserver(draw).observe(svg);

  figure.update = (next) => {
    data = next;
    shown = data.series.map(() => h("span.value"));
    legend.replaceChildren(h("strong", label), ...data.series.map((one, i) => h("span.item",
      s("svg.key", { viewBox: "0 0 18 8", "aria-hidden": "true" },
        s("path", { class: `curve ${one.second ? "second" : "first"}`, d: "M0 4H18" })), one.name, " ", shown[i])),
      h("span.where"));
    draw();
    point(at, false);
  };
  return figure;
}

function path(xs, ys, px, py) {
  let pen = "M", made = "";
  xs.forEach((x, i) => {
    if (!Number.isFinite(ys[i])) { pen = "M"; return; }
    made += `${pen}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return made;
}

function described(label, data, format) {
  const lines = data.series.map((one) => {
    const values = one.values.filter(Number.isFinite);
    return values.length ? `${one.name} from ${format(values[0])} to ${format(values.at(-1))}` : "no values";
  });
  return `${label} by ${data.xName || "time"}: ${lines.join("; ")}`;
}
