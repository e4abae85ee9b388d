// The server's API, with the visitor's key, which is kept until the tab is closed.

const KEPT = "kindler.key";

export const key = {
  get: () => sessionStorage.getItem(KEPT),
  set: (value) => sessionStorage.setItem(KEPT, value),
  forget: () => sessionStorage.removeItem(KEPT),
};

/** A failed request; status 0 means that the server did not answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Integers that a double cannot hold stay exact. */
function exact(_, value, context) {
  const large = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return large && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
}

export async function api(path, { method = "GET", query = {}, body, signal } = {}) {
  const url = new URL(`/api/v1/${path}`, location.origin);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let reply, text;
  try {
    reply = await fetch(url, { method, headers, body, signal, credentials: "omit", cache: "no-store" });
    text = await reply.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  let content;
  try {
    content = JSON.parse(text, exact);
  } catch {
    content = { message: text.slice(0, 300) };
  }
  if (!reply.ok) throw new ApiError(reply.status, content?.message || `The server returned status ${reply.status}.`);
  return content;
}

/** A name in a path; its slashes too are part of the name. */
export const part = encodeURIComponent;

/** Calls now and every `every` milliseconds while the page is visible, until the signal. */
export function polled(call, every, signal) {
  let timer = 0;
  const run = async () => {
    clearTimeout(timer);
    if (signal.aborted || document.visibilityState !== "visible") return;
    await call();
    clearTimeout(timer);
    if (!signal.aborted) timer = setTimeout(run, every);
  };
  document.addEventListener("visibilitychange", run, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
}
