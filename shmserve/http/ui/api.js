// Requests to the server that the page came from, and the keys that go with them.

const KEYS = { api: "shmserve.api-key", admin: "shmserve.admin-key" };
const given = {}; // where the browser lets the page keep nothing, a key lives as long as the page

/** A key, or "". Kept for this tab only. */
export function keyOf(which) {
  return given[which] ?? store()?.getItem(KEYS[which]) ?? "";
}

export function setKey(which, value) {
  given[which] = value;
  if (value) store()?.setItem(KEYS[which], value);
  else store()?.removeItem(KEYS[which]);
}

function store() {
  try {
    return sessionStorage;
  } catch {
    return null; // "block all cookies"
  }
}

/** An answer that is no 2xx, in the server's own words. */
export class Refusal extends Error {
  constructor(status, message, code, retryAfter) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  get wantsKey() {
    return this.status === 401 || this.code === "admin_key_required";
  }
}

/** A response that is 2xx. Throws Refusal for another, TypeError where there is no connection. `body` makes it a POST. */
export async function ask(path, { body, signal, asOperator = false } = {}) {
  const headers = {};
  const key = (asOperator && keyOf("admin")) || keyOf("api");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (response.ok) return response;
  const { message, code } = errorIn(await response.text(), `${response.status} ${response.statusText}`);
  throw new Refusal(response.status, message, code, Number(response.headers.get("Retry-After")) || 0);
}

function errorIn(text, otherwise) {
  try {
    const { error } = JSON.parse(text);
    return { message: String(error.message), code: error.code };
  } catch {
    return { message: text.trim().slice(0, 300) || otherwise, code: null }; // a proxy's page, not ours
  }
}
