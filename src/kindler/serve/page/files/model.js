// A model: its versions, tags, signature and training history, and a form to try it.

import { ApiError, api, part } from "./api.js";
import { lineChart } from "./chart.js";
import { about, card, cell, chip, count, h, short, size, table, toast, when } from "./dom.js";
import { shown } from "./tensors.js";
import { tryIt } from "./tryit.js";
import { generates, tryText } from "./trytext.js";

const SMALL = 64 * 2 ** 20; // bytes: a model up to this is loaded to be looked at
const PLOTS = 4; // of the columns that have drifted most
const FEW = 8; // versions that are shown at once
const NO_CURVE = new Set(["epoch", "step", "steps", "num_samples", "val_num_samples", "seconds", "rows_per_s"]);

export async function model({ bucket, name, version, may, signal, again }) {
  const ref = version ? `${name}@${version}` : name;
  const { result: told } = await api(`model/${part(ref)}`, { query: { bucket }, signal });
  const place = { bucket, name, version, signal, again };
  const known = h("div");
  const form = h("div");
  const drifted = h("div");
  const load = async () => {
    try {
      const served = await api(`model/${part(`${name}@${told.version}`)}/signature`, { query: { bucket }, signal });
      known.replaceChildren(signature(served));
      form.replaceChildren((generates(served) ? tryText : tryIt)(place, told, served, may("predict")));
      drifted.replaceChildren(await drift(place, told));
    } catch (error) {
      if (error.name === "AbortError") return;
      known.replaceChildren(signature(told.signature), h("p.said", error.message));
      form.replaceChildren(h("p.said", error.message));
    }
  };
  if (told.loaded || told.size <= SMALL) {
    known.append(h("p.note", "Loading…"));
    form.append(h("p.note", "Loading…"));
    load();
  } else {
    const button = () => h("button", { onclick: load }, `Load it (${size(told.size)})`);
    known.append(signature(told.signature), button());
    form.append(h("p.note", "Load the model to build the form from its inputs. "), button());
  }
  const facts = [["Kind", told.kind], ["Version", `${told.version} of ${told.newest}`], ["Size", size(told.size)],
    ["Stored", when(told.created)],
    ["Digest", h("code", { title: told.digest }, told.digest.slice(0, 12)), "wide"]];
  const curves = history(told.history);
  const said = [card("Signature", "", known), attributes(told)];
  const beside = curves && curves.querySelectorAll(".chart").length <= 2;
  const own = Object.keys(told.tags).filter((tag) => told.tags[tag] === told.version).sort();
  return h("div",
    about(bucket, "Models", name, [own.map(chip), told.version === told.newest ? "" : h("span.hint",
      `version ${told.version}; `, h("a", { href: address(bucket, name) }, `the newest is ${told.newest}`))], facts),
    h("div.pair",
      h("div", versions(place, told), tags(place, told, may("admin")), beside ? said : ""),
      h("div", beside ? curves : said)),
    beside ? "" : curves,
    drifted,
    lineage(bucket, told),
    card("Try it", "", form));
}

const address = (bucket, name, version) => `#/b/${bucket}/models/${part(name)}${version ? `/${version}` : ""}`;

function versions({ bucket, name }, told) {
  const columns = ["Version", "Tags", ["Size", "right"], ["Kind", "wide"], "Stored"];
  const body = h("div");
  const draw = (most) => {
    const rows = told.versions.slice(0, most).map((one) => [
      h("a", { href: address(bucket, name, one.version), "aria-current": String(one.version === told.version) },
        String(one.version)),
      one.tags.map((tag) => [chip(tag), " "]), size(one.size), h("span.quiet", one.kind), when(one.created)]);
    const more = told.versions.length - rows.length;
    body.replaceChildren(table("Versions", columns, rows),
      more ? h("button.plain.more", { onclick: () => draw(Infinity) }, `Show ${more} more`) : "");
  };
  draw(FEW);
  return card("Versions", ".flush", body);
}

function tags({ bucket, name, again }, told, may) {
  if (!may) return ""; // the table of versions lists the tags
  const said = h("p.said", { role: "alert" });
  const act = async (doing, sentence) => {
    said.textContent = "";
    try {
      await doing();
      toast(sentence);
      await again();
      document.querySelector(".tags select")?.focus();
    } catch (error) {
      said.textContent = error instanceof ApiError ? error.message : String(error);
    }
  };
  const path = (tag) => `model/${part(name)}/tags/${part(tag)}`;
  const move = (event, tag, version) => {
    event.preventDefault();
    const body = JSON.stringify({ version: Number(version) });
    const sent = () => api(path(tag), { method: "PUT", query: { bucket }, body });
    return act(sent, `${tag} now serves version ${version}.`);
  };
  const choice = (label, chosen) => h("select", { "aria-label": label },
    told.versions.map(({ version }) => h("option", { value: version, selected: version === chosen }, `version ${version}`)));
  const rows = Object.entries(told.tags).sort().map(([tag, at]) => {
    const target = choice(`Version for ${tag}`, at);
    const remove = () => {
      if (!confirm(`Remove the tag ${tag}? Requests for ${name}@${tag} will get 404.`)) return;
      act(() => api(path(tag), { method: "DELETE", query: { bucket } }), `${tag} was removed.`);
    };
    return h("li", h("form.line", { onsubmit: (event) => move(event, tag, target.value) },
      chip(tag), target, h("button", "Move"),
      h("button.plain.bad", { type: "button", "aria-label": `Remove ${tag}`, title: "Remove", onclick: remove }, "✕")));
  });
  const fresh = h("input", { "aria-label": "New tag", placeholder: "new tag", required: true,
    pattern: "[A-Za-z][A-Za-z0-9._\\-]{0,99}",
    title: "A letter, then letters, digits, dots, dashes or underscores", autocomplete: "off", spellcheck: "false" });
  const target = choice("Version for the new tag", told.version);
  return card("Tags", ".tags", h("ul.plain", rows),
    h("form.line", { onsubmit: (event) => move(event, fresh.value, target.value) }, fresh, target, h("button", "Add")), said);
}

function signature(told) {
  if (!told) return h("p.note", "Unknown until the model is loaded.");
  const rows = (specs, side) => specs.map((one) => [
    h("span.quiet", side), h("code", one.name), one.dtype || "any", h("code", shown(one.shape))]);
  const all = [...rows(told.inputs, "in"), ...rows(told.outputs, "out")];
  return h("div", table("Signature", ["", "Name", "Type", "Shape"], all),
    told.columns ? h("p.hint", "Columns: ", told.columns.map((name) => [h("code", name), " "])) : "");
}

async function drift({ bucket, name, signal }, told) {
  if (!told.statistics) return "";
  let report;
  try {
    report = await api(`model/${part(`${name}@${told.version}`)}/drift`, { query: { bucket }, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return error.status === 404 ? "" : card("Drift", "", h("p.said", error.message)); // 404: it is not watched
  }
  const all = [...Object.entries(report.columns), ...Object.entries(report.predictions)];
  all.sort(([, one], [, other]) => Boolean(other.alarm) - Boolean(one.alarm) || other.psi - one.psi);
  if (!report.sampled || !all.length) return card("Drift", "", h("p.note", "No request to compare with the training data yet."));
  const plots = all.slice(0, PLOTS).map(([column, one]) => {
    const plot = lineChart(column, { height: 150, zero: true, latest: false });
    plot.update({ x: one.bins[0].map((_, i) => i + 1), xName: "bin", series: [
      { name: "training", values: one.bins[0] }, { name: "requests", values: one.bins[1], second: true }] });
    return plot;
  });
  const columns = ["Column", ["PSI", "right"], ["KS", "right"], ["Missing", "right wide"], ["New", "right wide"]];
  return card("Drift", ".drift",
    h("p", { class: report.alarm ? "said" : "note" }, `${report.alarm ? "What the model is asked has drifted. " : "No alarm. "}` +
      `${report.sampled} rows of the last requests, beside the training data; share of rows in each bin:`),
    h("div.plots", plots),
    table("Drift", columns, all.map(([column, one]) => [
      [h("code", column), one.alarm ? h("div.alarm", one.alarm) : ""], short(one.psi), short(one.ks),
      short(one.missing[1]), short(one.new)])));
}

function attributes(told) {
  const known = Object.entries(told.attributes).filter(([name]) => name !== "history");
  if (!known.length) return "";
  return card("Attributes", "", h("dl.pairs", known.map(([name, value]) => [h("dt", name), h("dd", cell(value))])));
}

function lineage(bucket, told) {
  if (!told.lineage?.length) return "";
  const step = (what, ...lines) => h("li", h("b", what), lines.flat().filter(Boolean).map((line) => h("small", line)));
  const from = (data) => data && [data.kind, data.paths.map((path) => h("code", { title: path }, String(path).split("/").pop())),
    data.file_count > data.paths.length ? `${data.file_count} files` : ""].flat();
  const fits = told.lineage.map((fit) => h("ol.flow",
    step("Data", from(fit.data), fit.rows ? `${count(fit.rows)} rows` : "", fit.validation ? "with validation" : ""),
    step("Fit", when(fit.began), `${fit.framework}, ${fit.engine}, ${fit.workers} ${fit.workers === 1 ? "worker" : "workers"}`,
      `seed ${fit.seed}, from ${fit.parent?.version ?? fit.start}`)));
  told.lineage.slice(1).forEach(({ parent }, i) => { // what a fit made, the next one began with
    const [, name, number] = /^(.*)@(\d+)$/.exec(parent?.version ?? "") ?? [];
    fits[i].append(name ? step("Version", h("a", { href: address(bucket, name, number) }, parent.version)) :
      step("Weights", "not stored as a version"));
  });
  const own = Object.keys(told.tags).filter((tag) => told.tags[tag] === told.version).sort();
  fits.at(-1).append(
    step("Version", h("a", { href: address(bucket, told.name, told.version) }, `${told.name}@${told.version}`),
      Object.entries(told.lineage.at(-1).metrics ?? {}).map(([name, value]) => `${name} ${short(value)}`)),
    step("Tags", own.length ? own.map(chip) : "none"),
    step("Requests", `${count(told.requests)} since the server started`));
  return card("Lineage", ".lineage", fits);
}

function history(epochs) {
  const rows = epochs.filter((row) => row && typeof row === "object");
  if (!rows.length) return "";
  const names = [...new Set(rows.flatMap(Object.keys))]
    .filter((name) => rows.some((row) => Number.isFinite(row[name])));
  const x = rows.map((row, i) => (Number.isFinite(row.epoch) ? row.epoch : i + 1));
  const values = (name) => rows.map((row) => (typeof row[name] === "number" ? row[name] : null));
  const main = names
    .filter((name) => !NO_CURVE.has(name) && !(name.startsWith("val_") && names.includes(name.slice(4))));
  main.sort((a, b) => (b === "loss") - (a === "loss"));
  const plots = main.map((name) => {
    const plot = lineChart(name, { height: 210 });
    const series = [{ name: "training", values: values(name) }];
    if (names.includes(`val_${name}`)) series.push({ name: "validation", values: values(`val_${name}`), second: true });
    plot.update({ x, xName: "epoch", series });
    return plot;
  });
  return card("Training history", "",
    h("div.plots", plots),
    h("details", h("summary", `All metrics of ${rows.length} ${rows.length === 1 ? "epoch" : "epochs"}`),
      table("Training history", names.map((name) => [name, "right"]),
        rows.map((row) => names.map((name) => (row[name] == null ? "" : short(row[name])))))));
}
