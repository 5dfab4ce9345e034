// The page: puts its parts together, and says above all of them how the server is.

import { ask, keyOf, Refusal, setKey } from "./api.js";
import { Boundary } from "./boundary.js";
import { askForKey, notify, prepareChat } from "./chat.js";
import { byId, tell } from "./dom.js";
import { offerModels, prepareSettings } from "./settings.js";
import { Watch } from "./watch.js";

let boundary = null;
let known = ""; // the constants that `boundary` was made of
let hasModels = false;
let isWatching = false; // samples come, and say how the server is

const watch = new Watch({
  onHello(constants) {
    const words = JSON.stringify(constants);
    if (words !== known) boundary = new Boundary(constants); // else the same server again: its minute goes on
    known = words;
    byId("unlock").hidden = true;
    byId("panel").hidden = false;
    tell(byId("model-name"), constants.model);
    tell(byId("boundary-note"), `instance ${constants.instance}, version ${constants.version}`);
    if (!hasModels) loadModels();
  },
  onSample(sample) {
    isWatching = true;
    boundary.draw(sample);
    showState(...stateOf(sample.here));
  },
  onTrouble(error) {
    isWatching = false;
    const wantsKey = error instanceof Refusal && error.wantsKey;
    if (wantsKey) lockPanel(error);
    else if (error instanceof Refusal) tell(byId("boundary-note"), error.message);
    else {
      showState("ill", "no connection, trying again");
      tell(byId("boundary-note"), "no connection, trying again");
    }
  },
});

/** [kind, words] of the server as a whole. */
function stateOf({ is_draining: isDraining, workers }) {
  if (isDraining) return ["busy", "draining: no new requests"];
  const states = workers.map((worker) => worker.state);
  if (states.every((state) => state === "ready")) return ["good", "ready"];
  const ill = workers.find((worker) => worker.state !== "ready");
  const named = workers.length > 1 ? `worker ${ill.worker}` : "worker";
  if (ill.state === "loading") {
    const share = ill.fraction > 0 ? ` ${(ill.fraction * 100).toFixed(0)} %` : "";
    return ["busy", `${named} loading${share}`];
  }
  return ["ill", ill.state === "dead" ? `${named} is gone, a new one comes` : `${named} ${ill.state}`];
}

function showState(kind, words) {
  const state = byId("state");
  if (state.dataset.kind !== kind) state.dataset.kind = kind;
  tell(byId("state-text"), words);
}

/** The panel needs a key that we do not have, or not the right one. */
function lockPanel(error) {
  byId("panel").hidden = true;
  byId("unlock").hidden = false;
  tell(byId("boundary-note"), "locked");
  const wrong = keyOf("admin") ? "That key was not accepted. " : "";
  const which = error.status === 401 && !keyOf("api") ? "a key (--api-key, --admin-key)" : "the operator’s key (--admin-key)";
  tell(byId("unlock-text"), `${wrong}The boundary is shown to those who have ${which}.`);
}

async function loadModels() {
  try {
    const response = await ask("/v1/models");
    const { data } = await response.json();
    offerModels(data.map((model) => model.id));
    tell(byId("model-name"), data[0].id);
    hasModels = true;
    notify("");
    if (!isWatching) showState("good", "answers");
  } catch (error) {
    if (error instanceof Refusal && error.wantsKey) {
      showState("busy", "asks for a key");
      askForKey();
    } else if (error instanceof Refusal) {
      notify(error.message);
    } else {
      console.info("no list of models:", error.message); // the panel says that there is no connection
    }
  }
}

function prepareViews() {
  const names = ["chat", "boundary"];
  for (const name of names) {
    byId(`view-${name}`).addEventListener("click", () => {
      byId("halves").dataset.view = name;
      for (const each of names) byId(`view-${each}`).setAttribute("aria-pressed", String(each === name));
    });
  }
}

byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey("admin", byId("unlock-key").value.trim());
  byId("unlock-key").value = "";
  watch.open();
});
prepareSettings(() => {
  hasModels = false;
  loadModels();
  if (boundary === null || !byId("unlock").hidden) watch.open();
});
prepareChat();
prepareViews();
loadModels();
watch.open();
