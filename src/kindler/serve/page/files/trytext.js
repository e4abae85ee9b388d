// A form that asks a text model, and shows its answer as it comes.

import { key } from "./api.js";
import { count, h, milliseconds } from "./dom.js";

const GENERATES = ["text-generation", "text2text-generation"];

/** Whether a model's form is this one. */
export const generates = (signature) => GENERATES.includes(signature.text?.task);

export function tryText({ bucket, name, version, signal }, told, signature, may) {
  if (!may) return h("p.note", "Your API key lacks the scope predict.");
  const { chat } = signature.text;
  const text = h("textarea", { id: "try-prompt", rows: "5", required: true });
  const tags = Object.entries(told.tags).sort();
  const targets = [...tags.map(([tag, at]) => [`@${tag}`, `${tag} (version ${at})`]),
    ["", "newest"], ...told.versions.map((one) => [`@${one.version}`, `version ${one.version}`])];
  const preferred = version ? `@${version}` : targets[0][0];
  const target = h("select", { id: "try-target" },
    targets.map(([value, label]) => h("option", { value, selected: value === preferred }, label)));
  const most = h("input", { id: "try-most", type: "number", min: "1", max: "4096", value: "128" });
  const heat = h("input", { id: "try-heat", type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const send = h("button.primary", chat ? "Ask" : "Continue");
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const said = h("pre.answer", { tabindex: "0", "aria-live": "polite", "aria-label": "Answer" });
  const facts = h("p.answered", h("span.hint", "The answer appears here."));
  let asking = null;
  signal.addEventListener("abort", () => asking?.abort());
  stop.addEventListener("click", () => asking?.abort());

  const ask = async (event) => {
    event.preventDefault();
    if (asking) return;
    asking = new AbortController();
    const common = { model: name + target.value, max_tokens: Number(most.value) || 128,
      temperature: Number(heat.value) || 0, stream: true, stream_options: { include_usage: true } };
    const path = chat ? "chat/completions" : "completions";
    const body = chat ? { ...common, messages: [{ role: "user", content: text.value }] }
      : { ...common, prompt: text.value };
    send.disabled = true;
    stop.disabled = false;
    said.textContent = "";
    said.setAttribute("aria-busy", "true");
    facts.replaceChildren(h("span.hint", "Waiting for the first token…"));
    const began = performance.now();
    let first = 0, reason = "", usage = null;
    try {
      await events(path, bucket, body, asking.signal, (chunk) => {
        const choice = chunk.choices[0];
        const more = choice?.delta?.content ?? choice?.text ?? "";
        if (more && !first) {
          first = performance.now() - began;
          facts.replaceChildren(h("span.hint", `first token after ${milliseconds(first)}`));
        }
        said.append(more);
        reason = choice?.finish_reason ?? reason;
        usage = chunk.usage ?? usage;
      });
      const took = (performance.now() - began) / 1000;
      const tokens = usage?.completion_tokens ?? 0;
      facts.replaceChildren(h("strong", `${count(tokens)} tokens`),
        ` at ${count(Math.round(tokens / Math.max(took, 0.001)))} per second`,
        h("span.hint", ` · first after ${milliseconds(first)} · ${reason === "length" ? "cut at the limit" : "complete"}`));
    } catch (error) {
      if (signal.aborted) return;
      facts.replaceChildren(error.name === "AbortError" ? h("span.hint", "Stopped.") : h("span.said", error.message));
    } finally {
      asking = null;
      send.disabled = false;
      stop.disabled = true;
      said.removeAttribute("aria-busy");
    }
  };

  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) text.form.requestSubmit();
  });
  return h("div.pair",
    h("form", { onsubmit: ask, "aria-label": "Try it" },
      h("div.line", h("label", { for: "try-target" }, "Model"), target),
      h("label", { for: "try-prompt" }, chat ? "Message" : "Prompt"), text,
      h("div.line", h("label", { for: "try-most" }, "tokens"), most,
        h("label", { for: "try-heat" }, "temperature"), heat),
      h("div.line", send, stop, h("span.hint.wide", "or Ctrl+Enter"))),
    h("div.result", facts, said));
}

/** Calls `got` with each event of an answer; an event or a reply that is an error is thrown. */
async function events(path, bucket, body, signal, got) {
  const url = new URL(`/v1/${path}`, location.origin);
  url.searchParams.set("bucket", bucket);
  const headers = { "content-type": "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal,
    credentials: "omit", cache: "no-store" });
  if (!reply.ok) throw new Error((await reply.json()).error?.message ?? `The server returned status ${reply.status}.`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server ended the answer before it was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      got(chunk);
    }
  }
}
