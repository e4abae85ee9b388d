// A form that sends a prediction, built from the model's signature; the result is shown as a table.

import { api, key, part } from "./api.js";
import { cell, count, h, milliseconds, table } from "./dom.js";
import { checked, example, isObject, lines, outputTable, shown } from "./tensors.js";

const kept = new Map(); // what was typed for a model, so that it outlives a moved tag
const ROWS = 100; // of an answer that are shown
const ALOUD = 300_000; // characters up to which the shape is checked while typing

export function tryIt({ bucket, name, version, signal }, told, signature, may) {
  if (!may) return h("p.note", "Your API key lacks the scope predict.");
  const text = h("textarea", { id: "try-data", spellcheck: "false", rows: "8", "aria-describedby": "try-shape" });
  const shape = h("p", { id: "try-shape", class: "hint", role: "status" });
  const rows = h("input", { id: "try-rows", type: "number", min: "1", max: "1000", value: "2" });
  const tags = Object.entries(told.tags).sort();
  const targets = [...tags.map(([tag, at]) => [`@${tag}`, `${tag} (version ${at})`]),
    ["", "newest"], ...told.versions.map((one) => [`@${one.version}`, `version ${one.version}`])];
  const mine = kept.get(`${bucket}/${name}`) || {};
  kept.set(`${bucket}/${name}`, mine);
  const preferred = version ? `@${version}` : mine.target ?? targets[0][0];
  const target = h("select", { id: "try-target", onchange: () => { mine.target = target.value; } },
    targets.map(([value, label]) => h("option", { value, selected: value === preferred }, label)));
  const method = h("select", { id: "try-method" }, signature.methods.map((one) => h("option", { value: one }, one)));
  const send = h("button.primary", "Predict");
  const result = h("div.result", { "aria-live": "polite" }, h("p.note", "The result appears here."));
  const takes = signature.inputs.map((spec) => `${spec.name}: ${spec.dtype || "any type"} ${shown(spec.shape)}`).join("; ");

  const fill = (how) => {
    const made = example(signature, Math.max(1, Number(rows.value) || 1), how);
    text.value = made ? lines(made) : "";
    if (made) look();
    else shape.replaceChildren("A row of this model is too long for this form; paste it, or send it from a program.");
  };
  const look = () => {
    mine.text = text.value;
    if (text.value.length > ALOUD) return;
    let data;
    try {
      data = JSON.parse(text.value);
    } catch (error) {
      shape.className = "hint bad";
      shape.replaceChildren(`Not valid JSON: ${error.message}`);
      return;
    }
    const found = checked(data, signature);
    shape.className = `hint ${found.ok ? "good" : "bad"}`;
    shape.replaceChildren(`${found.ok ? "✓" : "✗"} ${found.text} `);
    if (found.reshaped) {
      const apply = () => { text.value = lines(found.reshaped.data); look(); };
      shape.append(h("button.plain", { type: "button", onclick: apply }, `Make it ${shown(found.reshaped.shape)}`));
    }
  };

  const predict = async (event) => {
    event.preventDefault();
    let body;
    try {
      body = bodyOf(JSON.parse(text.value), text.value);
    } catch (error) {
      result.replaceChildren(h("p.said", `The input is not valid JSON: ${error.message}`));
      text.focus();
      return;
    }
    const path = `model/${part(name + target.value)}/${method.value}`;
    send.disabled = true;
    result.setAttribute("aria-busy", "true");
    const began = performance.now();
    try {
      const reply = await api(path, { method: "PUT", query: { bucket }, body, signal });
      const took = performance.now() - began;
      result.replaceChildren(answer(reply, took), request(path, bucket, body));
    } catch (error) {
      if (error.name === "AbortError") return;
      result.replaceChildren(h("p.said", error.message), request(path, bucket, body));
    } finally {
      send.disabled = false;
      result.removeAttribute("aria-busy");
    }
  };

  text.addEventListener("input", look);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) text.form.requestSubmit();
  });
  rows.addEventListener("change", () => fill("steps"));
  if (mine.text) { text.value = mine.text; look(); } else fill("steps");
  return h("div.pair",
    h("form", { onsubmit: predict, "aria-label": "Try it" },
      h("div.line", h("label", { for: "try-target" }, "Model"), target,
        signature.methods.length > 1 ? [h("label", { for: "try-method" }, "method"), method] : ""),
      h("div.line.between", h("label", { for: "try-data" }, "Input as JSON"),
        h("span.line", h("label", { for: "try-rows" }, "rows"), rows,
          h("button", { type: "button", onclick: () => fill("zeros") }, "Zeros"),
          h("button", { type: "button", onclick: () => fill("random") }, "Random"))),
      text, shape, h("p.hint", `Inputs: ${takes}`),
      h("div.line", send, h("span.hint.wide", "or Ctrl+Enter"))),
    result);
}

/** What is sent: rows as `data`; a whole body with `data` in it as it is. The text goes out unchanged. */
function bodyOf(data, text) {
  return isObject(data) && "data" in data ? text : `{"data": ${text}}`;
}

function answer(reply, took) {
  const { columns, rows } = outputTable(reply.result);
  const numbers = columns.map((name, i) => [name, typeof rows[0]?.[i] === "number" ? "right" : ""]);
  const kinds = typeof reply.dtype === "string" ? reply.dtype : Object.values(reply.dtype).join(", ");
  return h("div",
    h("p.answered", h("strong", `Version ${reply.version}`), ` answered in ${milliseconds(took)}`,
      h("span.hint", ` · ${kinds}`)),
    table("Result", [["", "right quiet"], ...numbers],
      rows.slice(0, ROWS).map((row, i) => [String(i), ...row.map(cell)])),
    rows.length > ROWS ? h("p.hint", `${ROWS} of ${count(rows.length)} rows.`) : "");
}

function request(path, bucket, body) {
  const quoted = (word) => `'${word.replaceAll("'", "'\\''")}'`;
  const url = `${location.origin}/api/v1/${path}${bucket === "default" ? "" : `?bucket=${bucket}`}`;
  const auth = key.get() ? ` -H "Authorization: Bearer $KINDLER_KEY"` : "";
  const sent = body.length > 4000 ? "@input.json" : body.replace(/\s*\n\s*/g, " ");
  return h("details", h("summary", "Same request with curl"),
    h("pre", { tabindex: "0" }, h("code",
      `curl -X PUT ${quoted(url)}${auth} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(sent)}`)));
}
