// The frame of the page: routing, the bar on top, and signing in.

import { ApiError, api, key } from "./api.js";
import { activity } from "./activity.js";
import { dataset } from "./dataset.js";
import { h } from "./dom.js";
import { datasets, models } from "./lists.js";
import { model } from "./model.js";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const corner = document.getElementById("session");
let leaving = new AbortController();
let session = null;
let first = true;

/** `#/b/live/models/of%2F0/3` is the model `of/0` of the bucket `live`, at its third version. */
export function parsed(hash) {
  const parts = hash.replace(/^#?\/?/, "").split("/").map((text) => {
    try { return decodeURIComponent(text); } catch { return text; }
  });
  if (parts[0] === "activity") return { view: "activity", bucket: "default" };
  const [, bucket, shelf, name, version] = parts[0] === "b" ? parts : ["b", "default", "models"];
  return { view: shelf === "datasets" ? "datasets" : "models", bucket: bucket || "default", name, version };
}

const VIEWS = {
  models: (at) => (at.name ? model : models),
  datasets: (at) => (at.name ? dataset : datasets),
  activity: () => activity,
};

const may = (scope) => Boolean(session) && [scope, "admin"].some((one) => session.scopes.includes(one));

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const at = parsed(location.hash);
  main.setAttribute("aria-busy", "true");
  try {
    session ??= await api("key", { signal });
    const failed = (error) => fail(error, signal);
    const [view, { buckets }] = await Promise.all([
      VIEWS[at.view](at)({ ...at, may, signal, again: show, failed }), api("buckets", { signal })]);
    if (signal.aborted) return;
    bar(at, buckets);
    put(view, at);
  } catch (error) {
    fail(error, signal);
  }
}

function put(view, at) {
  main.removeAttribute("aria-busy");
  main.replaceChildren(view);
  const heading = main.querySelector("h1");
  document.title = heading ? `${heading.textContent} · Kindler` : "Kindler";
  if (!first && put.last !== location.hash) {
    scrollTo(0, 0);
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
  }
  first = false;
  put.last = at ? location.hash : null;
}

function fail(error, signal) {
  if (error.name === "AbortError" || signal.aborted) return;
  leaving.abort(); // pending requests of the view
  if (!(error instanceof ApiError)) console.error(error);
  if (error.status === 401 || (error.status === 403 && !may("read"))) { // a key without access to any view
    session = null;
    nav.replaceChildren();
    corner.replaceChildren();
    put(signIn(key.get() ? error.message : ""));
    return;
  }
  if (session) bar(parsed(location.hash), null);
  put(h("div.card.problem", { role: "alert" },
    h("h1", error.status === 404 ? "Not found" : error.status === 403 ? "Not allowed" : "Something went wrong"),
    h("p.said", error instanceof ApiError ? error.message : "The page failed; see the browser's console."),
    h("a", { href: "#/" }, "All models"), " · ", h("button.plain", { onclick: show }, "Try again")));
}

function bar(at, buckets) {
  const shelves = ["Models", "Datasets"].map((text) => [text, `#/b/${at.bucket}/${text.toLowerCase()}`]);
  nav.replaceChildren(...[...shelves, ["Activity", "#/activity"]].map(([text, href]) => h("a",
    { href, "aria-current": text.toLowerCase() === at.view ? "page" : null }, text)));
  const all = [...new Set([at.bucket, ...(buckets || [])])].sort();
  const choose = (event) => { location.hash = `#/b/${event.target.value}/${at.view}`; };
  corner.replaceChildren(
    at.view === "activity" ? "" : h("label", h("span.wide", "Bucket "),
      h("select", { "aria-label": "Bucket", onchange: choose },
        all.map((name) => h("option", { value: name, selected: name === at.bucket }, name)))),
    session.open ? ""
      : h("button.plain", { onclick: signOut, title: `Key ${session.id}: ${session.scopes.join(", ")}` }, "Sign out"));
}

function signOut() {
  key.forget();
  session = null;
  show();
}

function signIn(problem) {
  const input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
    placeholder: "kdl_…", "aria-describedby": "key-said" });
  const submit = (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    show();
  };
  const form = h("form.card.sign-in", { onsubmit: submit },
    h("h1", "Sign in"),
    h("p", "This server requires an API key. The key is kept in this tab only, until you close it."),
    h("label", { for: "key" }, "API key"), input,
    h("p", { id: "key-said", class: "said", role: "alert" }, problem),
    h("button.primary", "Sign in"),
    h("p.hint", "The server's administrator creates one: ",
      h("code", "kindler keys add --scope read --scope predict")));
  requestAnimationFrame(() => input.focus());
  return form;
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is for views
  main.focus();
});
addEventListener("hashchange", show);
show();
