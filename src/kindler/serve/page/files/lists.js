// The models and the datasets of a bucket.

import { api, part } from "./api.js";
import { chip, count, h, size, table, when } from "./dom.js";
import { strip } from "./activity.js";

const MOST = 300; // rows that are drawn; a filter finds the others

function listed(title, things, noun, columns, row, top, none) {
  const body = h("div");
  const summary = h("span.hint", { role: "status" });
  const draw = (text) => {
    const found = things.filter((thing) => thing.name.toLowerCase().includes(text.trim().toLowerCase()));
    summary.textContent = found.length > MOST ? `${MOST} of ${count(found.length)}: filter to see more`
      : `${count(found.length)} ${noun}${found.length === 1 ? "" : "s"}`;
    body.replaceChildren(found.length ? table(title, columns, found.slice(0, MOST).map(row))
      : h("p.note", `No ${noun} has “${text.trim()}” in its name.`));
  };
  draw("");
  return h("div",
    h("div.head", h("h1", title), things.length ? summary : "",
      things.length > 5 ? h("input.filter", { type: "search", placeholder: "Filter by name",
        "aria-label": `Filter the ${noun}s by name`, oninput: (event) => draw(event.target.value) }) : ""),
    top, things.length ? h("section.card.flush", body) : none);
}

export async function models({ bucket, signal, failed }) {
  const told = await api("models", { query: { bucket }, signal });
  const columns = ["Name", ["Newest", "right"], "Tags", "Kind", ["Size", "right"], ["Stored", "wide"]];
  const row = (one) => [
    h("a.name", { href: `#/b/${bucket}/models/${part(one.name)}` }, one.name),
    String(one.version),
    Object.entries(one.tags).sort().map(([tag, version]) => [chip(`${tag} → ${version}`), " "]),
    h("span.quiet", one.kind), size(one.size), when(one.created),
  ];
  const words = "Store a model and it is served immediately: Keras, PyTorch, scikit-learn, ONNX, or an Estimator.";
  return listed("Models", told.models, "model", columns, row, strip(signal, failed),
    empty(bucket, "model", words, 'model, "first", tag="prod"'));
}

export async function datasets({ bucket, signal }) {
  const told = await api("datasets", { query: { bucket }, signal });
  const columns = ["Name", "Kind", ["Rows", "right"], ["Columns", "right wide"], ["Size", "right"],
    ["Version", "right wide"], ["Stored", "wide"]];
  const row = (one) => [
    h("a.name", { href: `#/b/${bucket}/datasets/${part(one.name)}` }, one.name),
    h("span.quiet", one.kind), count(one.rows), count(one.columns?.length), size(one.size), String(one.version),
    when(one.created),
  ];
  const words = "Store a DataFrame, a table or an array, and its first rows appear here.";
  return listed("Datasets", told.datasets, "dataset", columns, row, "", empty(bucket, "dataset", words, 'frame, "first"'));
}

function empty(bucket, noun, words, line) {
  const om = bucket === "default" ? "om" : `om["${bucket}"]`;
  const lines = ["from kindler import om\n", 'om.setup("…")  # the store of this server (--store)',
    `${om}.${noun}s.put(${line})`];
  return h("section.card.empty", h("h2", `There is no ${noun} in the bucket ${bucket} yet`), h("p", words),
    h("pre", h("code", lines.join("\n"))));
}
