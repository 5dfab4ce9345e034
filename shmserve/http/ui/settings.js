// The settings dialog: what goes with a request, the colours, the keys. Settings are kept in localStorage, keys by api.js for this tab.

import { keyOf, setKey } from "./api.js";
import { byId, make, tell } from "./dom.js";

const STORE = "shmserve.settings";
const FIELDS = ["system", "temperature", "top-p", "max-tokens", "seed", "stop"];
const dialog = byId("settings");
const form = byId("settings-form");
const model = byId("set-model");
const field = (name) => byId(`set-${name}`);

let onChange = () => {};

/** Prepare the dialog; `changed` is called when it has been closed. */
export function prepareSettings(changed) {
  onChange = changed;
  const saved = read();
  for (const name of FIELDS) field(name).value = saved[name] ?? "";
  for (const radio of form.elements.theme) radio.checked = radio.value === (saved.theme ?? "auto");
  showTheme(saved.theme ?? "auto");
  form.addEventListener("change", onEdit);
  form.addEventListener("submit", (event) => {
    if (!isGood()) event.preventDefault();
  });
  dialog.addEventListener("cancel", (event) => {
    if (!isGood()) event.preventDefault();
  });
  dialog.addEventListener("close", () => {
    keep();
    onChange();
  });
  byId("open-settings").addEventListener("click", () => openSettings());
}

/** Open the dialog, at the field of this name if one is given. */
export function openSettings(at = null) {
  field("api-key").value = keyOf("api");
  field("admin-key").value = keyOf("admin");
  if (!dialog.open) dialog.showModal();
  (at === null ? byId("close-settings") : field(at)).focus();
}

/** The models that may be asked for. */
export function offerModels(names) {
  const before = model.value;
  model.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  if (names.includes(before)) model.value = before;
}

/** What a request says beside its messages. */
export function requestFields() {
  const fields = {};
  if (model.value) fields.model = model.value;
  for (const [name, key] of [
    ["temperature", "temperature"],
    ["top-p", "top_p"],
    ["max-tokens", "max_tokens"],
    ["seed", "seed"],
  ]) {
    const input = field(name);
    if (input.value !== "" && input.checkValidity()) fields[key] = Number(input.value);
  }
  const stop = field("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  return fields;
}

export function systemPrompt() {
  return field("system").value;
}

function onEdit(event) {
  if (event.target.name === "theme") showTheme(event.target.value);
  isGood();
}

/** Whether every field can be sent; says which cannot. */
function isGood() {
  const labels = { temperature: "Temperature", "top-p": "Top p", "max-tokens": "Most tokens", seed: "Seed" };
  const wrong = Object.keys(labels).find((name) => !field(name).checkValidity());
  tell(byId("settings-error"), wrong ? `${labels[wrong]}: ${field(wrong).validationMessage}` : "");
  if (wrong) field(wrong).focus();
  return !wrong;
}

function keep() {
  setKey("api", field("api-key").value.trim());
  setKey("admin", field("admin-key").value.trim());
  const theme = form.elements.theme.value;
  const saved = { theme };
  for (const name of FIELDS) if (field(name).value !== "") saved[name] = field(name).value;
  try {
    localStorage.setItem(STORE, JSON.stringify(saved));
  } catch (error) {
    console.info("the settings are not kept:", error.message); // the browser forbids it, or is full
  }
}

function read() {
  try {
    const saved = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    return typeof saved === "object" && saved !== null ? saved : {};
  } catch {
    return {}; // another version wrote it, or somebody by hand
  }
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
