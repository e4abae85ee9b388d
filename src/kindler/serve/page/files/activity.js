// Live activity: requests, latencies, queues, loaded models. Polled every two seconds while visible.

import { ApiError, api, part, polled } from "./api.js";
import { lineChart } from "./chart.js";
import { card, count, h, milliseconds, short, size, table, when } from "./dom.js";

const EVERY = 2000;
const X = Array.from({ length: 60 }, (_, i) => i - 60);
const ago = (x) => (x === 0 ? "now" : `${x} s`);

function charts() {
  const rate = lineChart("Requests per second", { zero: true, xFormat: ago });
  const latency = lineChart("Latency", { zero: true, xFormat: ago, format: milliseconds,
    tick: (y) => `${short(y)} ms`, gap: "No requests in the last minute." });
  const update = (stats) => {
    rate.update({ x: X, xName: "", series: [{ name: "", values: stats.per_second }] });
    const { p50, p99 } = stats.latency_ms_per_second;
    latency.update({ x: X, xName: "", series: [{ name: "p99", values: p99, second: true }, { name: "p50", values: p50 }] });
  };
  return { rate, latency, update };
}

function tiles(stats) {
  const last = stats.requests_last_minute;
  const memory = stats.loaded.reduce((all, one) => all + one.size, 0);
  const failed = stats.failures_last_minute;
  const { p50, p99 } = stats.latency_ms;
  const figures = [
    ["Requests", `${short(stats.requests_per_second)}/s`, `${count(last)} in the last minute`],
    ["Failures", count(failed), "in the last minute", failed ? "bad" : ""],
    ["Latency p50", milliseconds(last ? p50 : null), last ? `p99 ${milliseconds(p99)}` : "no requests"],
    ["Queue", count(stats.rows_waiting), "rows waiting"],
    ["In memory", count(stats.loaded.length), `${stats.loaded.length === 1 ? "model" : "models"}, ${size(memory)}`],
  ];
  return figures.map(([name, value, more, kind]) => h("div.tile", h("dt", name),
    h("dd", h("b", { class: kind }, value), h("small", more))));
}

function watched(signal, failed, update, state) {
  polled(async () => {
    try {
      update(await api("stats", { signal }));
      state.textContent = "";
    } catch (error) {
      if (error instanceof ApiError && error.status !== 401) state.textContent = error.message;
      else failed(error);
    }
  }, EVERY, signal);
}

/** The figures in one line, for the top of another view. */
export function strip(signal, failed) {
  const row = h("dl.tiles");
  const state = h("p.said", { role: "status" });
  watched(signal, failed, (stats) => row.replaceChildren(...tiles(stats)), state);
  return h("a.strip", { href: "#/activity", "aria-label": "Activity" }, row, state);
}

export async function activity({ signal, failed }) {
  const stats = await api("stats", { signal });
  const row = h("dl.tiles");
  const state = h("p.said", { role: "status" });
  const { rate, latency, update } = charts();
  const resident = h("div"), workers = h("div");
  const draw = (now) => {
    row.replaceChildren(...tiles(now));
    update(now);
    workers.replaceChildren(tasks(now.runtime));
    resident.replaceChildren(now.loaded.length ? loaded(now)
      : h("p.note", "None. A model is loaded on its first request."));
  };
  draw(stats);
  watched(signal, failed, draw, state);
  return h("div",
    h("div.head", h("h1", "Activity"), h("span.hint", "since ", when(stats.started)), state),
    row,
    h("div.pair", h("section.card", rate), h("section.card", latency)),
    card("Models in memory", ".flush", resident),
    card("Workers and queue", ".flush", workers));
}

function loaded(stats) {
  const columns = ["Model", ["Version", "right"], ["Requests", "right"], ["p50", "right"], ["p99", "right wide"],
    ["Requests per batch", "right wide"], ["Rows waiting", "right"], ["Size", "right wide"]];
  return table("Models in memory", columns, stats.loaded.map((one) => {
    const live = stats.models[one.name];
    const { p50, p99 } = live?.requests_last_minute ? live.latency_ms : {};
    const name = one.bucket === "default" ? one.name : `${one.bucket} / ${one.name}`;
    return [
      h("a.name", { href: `#/b/${one.bucket}/models/${part(one.name)}` }, name), String(one.version),
      live ? `${short(live.requests_per_second)}/s` : "", milliseconds(p50), milliseconds(p99),
      live?.batches ? short(live.requests_per_batch) : "–", count(one.rows_waiting), size(one.size),
    ];
  }));
}

function tasks(load) {
  if (!load || load.problem) return h("p.note", load?.problem || "This server does not run tasks.");
  return table("Workers and queue", ["Engine", ["Workers", "right"], ["Busy", "right"], ["Tasks waiting", "right"]],
    [[load.engine, load.workers, load.busy, load.waiting].map((value) => String(value ?? "–"))]);
}
