// A dataset: its metadata and its first rows.

import { ApiError, api, part } from "./api.js";
import { about, card, cell, count, h, size, table, when, written } from "./dom.js";

const ROWS = 20;
const BYTES = 2_000_000; // about as much as is fetched to be looked at

export async function dataset({ bucket, name, signal }) {
  const { datasets } = await api("datasets", { query: { bucket, pattern: name }, signal });
  const found = datasets.find((one) => one.name === name);
  if (!found) throw new ApiError(404, `There is no dataset “${name}” in the bucket ${bucket}.`);
  const fit = found.rows ? Math.floor((BYTES * found.rows) / Math.max(1, found.size)) : ROWS;
  const limit = Math.min(ROWS, Math.max(1, fit));
  const facts = [["Kind", found.kind], ["Rows", count(found.rows) || "–"], ["Size", size(found.size)],
    ["Version", String(found.version)], ["Stored", when(found.created)]];
  let preview;
  try {
    preview = shown(await api(`dataset/${part(name)}`, { query: { bucket, limit, orient: "list" }, signal }), found);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    preview = h("p.said", error.message);
  }
  return h("div",
    about(bucket, "Datasets", name, "", facts),
    card("Preview", ".flush", preview));
}

function shown(told, found) {
  if (told.columns) {
    const names = Object.keys(told.columns);
    const heads = Object.entries(told.columns)
      .map(([name, type]) => [[name, h("small", type)], numeric(type) ? "right" : ""]);
    const rows = told.index.values.map((_, i) => names.map((name) => cell(told.data[name][i])));
    return [table("First rows", heads, rows), note(rows.length, found.rows)];
  }
  if (told.shape && told.shape.length) {
    const wide = told.shape.length === 2 && told.shape[1] <= 50;
    const heads = wide ? Array.from({ length: told.shape[1] }, (_, i) => [String(i), "right"]) : ["value"];
    const rows = told.data.map((row) => (wide ? row.map(cell) : [cell(row)]));
    const of = [count(found.rows) || "rows", ...told.shape.slice(1)].join(" × ");
    return [h("p.hint", `${told.dtype}, ${of}`), table("First rows", heads, rows), note(rows.length, found.rows)];
  }
  if (found.kind === "arrays") {
    const names = Object.keys(told.data);
    const lists = names.map((name) => [told.data[name]].flat());
    const rows = Array.from({ length: Math.max(...lists.map((list) => list.length)) },
      (_, i) => lists.map((list) => (i in list ? cell(list[i]) : "")));
    return [table("First rows", names, rows), note(rows.length, found.rows)];
  }
  const text = written(told.data, 2);
  return h("pre", { tabindex: "0" }, h("code", text.length > 20_000 ? `${text.slice(0, 20_000)}\n…` : text));
}

const numeric = (type) => /^(u?int|float|double|halffloat|decimal)/.test(type);

const note = (rows, all) => h("p.hint", all > rows ? `First ${rows} of ${count(all)} rows.` : `${rows} ${rows === 1 ? "row" : "rows"}.`);
