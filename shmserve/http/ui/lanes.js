// The picture of the boundary: on the left the workers, on the right the front ends, between them the two rings of each pair.

import { make, tell } from "./dom.js";
import { count, span } from "./stats.js";

const MOST_PAIRS = 8;
const STALE_MS = 3_000;

export class Lanes {
  constructor(element) {
    this._element = element;
    this._pairs = new Map(); // "0-0" -> the parts of its row
    this._more = make("p", { class: "lanes-more" });
  }

  /** Show the pairs of a sample. `constants` says how many there should be: one without rings is shown as broken. */
  draw(sample, constants, point) {
    const wanted = [];
    for (let worker = 0; worker < constants.num_workers; worker++) {
      for (let http = 0; http < constants.num_http; http++) wanted.push([worker, http]);
    }
    for (const [worker, http] of wanted.slice(0, MOST_PAIRS)) {
      const key = `${worker}-${http}`;
      if (!this._pairs.has(key)) this._pairs.set(key, this._add(worker, http));
      this._fill(this._pairs.get(key), sample, worker, http, wanted.length === 1 ? point : null);
    }
    const hidden = wanted.length - MOST_PAIRS;
    if (hidden > 0) {
      tell(this._more, `and ${hidden} more pairs`);
      this._element.append(this._more);
    }
  }

  _add(worker, http) {
    const parts = { engine: box(`worker ${worker}`, "engine"), wire: box(`front end ${http}`, "wire") };
    parts.tokens = lane("tokens", "engine");
    parts.submit = lane("submit", "wire");
    parts.row = make("div", { class: "pair" }, parts.engine.element,
      make("div", { class: "pair-lanes" }, parts.tokens.element, parts.submit.element), parts.wire.element);
    this._element.append(parts.row);
    return parts;
  }

  _fill(parts, sample, worker, http, point) {
    const of = (role, index) => sample.processes.find((each) => each.role === role && each.index === index);
    const engine = of("worker", worker);
    const front = of("http", http);
    const link = sample.here.workers.find((each) => each.worker === worker);
    const isLoading = link?.state === "loading" && link.fraction > 0;
    fillBox(parts.engine, engine, isLoading ? `loading ${(link.fraction * 100).toFixed(0)} %` : link?.state, [
      engine && `${count(engine.words.running)} running`,
      point?.generated != null && `${count(point.generated)} tok/s`,
    ]);
    // A front end has no steps: between two events it is idle, however many streams it has.
    fillBox(parts.wire, front, front?.phase === "idle" && front.words.in_flight ? "serving" : "", [
      front && `${count(front.words.in_flight)} in flight`,
      point?.framed != null && `${count(point.framed)} frames/s`,
    ]);
    const ring = (kind) =>
      sample.rings
        .filter((each) => each.kind === kind && each.worker === worker && each.http === http)
        .reduce((newest, each) => (newest === undefined || each.epoch > newest.epoch ? each : newest), undefined);
    fillLane(parts.tokens, ring("tokens"));
    fillLane(parts.submit, ring("submit"));
  }
}

function box(name, side) {
  const phase = make("p", { class: "box-phase" });
  const facts = make("p", { class: "box-facts" });
  return { phase, facts, element: make("div", { class: `box ${side}` }, make("h4", { text: name }), phase, facts) };
}

/** `state` overrules the board where that cannot know: a worker that is dead or stopped says nothing of itself any more. */
function fillBox(parts, process, state, facts) {
  const isSilent = process !== undefined && process.heartbeat_age_ms !== null && process.heartbeat_age_ms > STALE_MS;
  let words = process?.phase?.replaceAll("_", " ") ?? "gone";
  if (state && state !== "ready") words = state === "dead" ? "gone" : state;
  else if (isSilent) words = `silent for ${span(process.heartbeat_age_ms * 1e3)}`;
  tell(parts.phase, words);
  const told = process === undefined ? [] : facts.filter(Boolean);
  while (parts.facts.children.length < told.length) parts.facts.append(make("span"));
  [...parts.facts.children].forEach((line, i) => tell(line, told[i] ?? ""));
  const isIll = process === undefined || isSilent || ["dead", "stopped", "hung"].includes(state);
  parts.element.classList.toggle("is-ill", isIll);
  parts.element.classList.toggle("is-busy", !isIll && state === "loading");
}

function lane(kind, side) {
  const fillOf = make("span", { class: "lane-fill" });
  const peak = make("span", { class: "lane-peak" });
  const figure = make("span", { class: "lane-figure" });
  const most = make("p", { class: "lane-figure lane-most" });
  const element = make(
    "div",
    { class: `lane ${side} ${kind}` },
    make("p", { class: "lane-name" }, make("span", { text: kind }), figure),
    make("div", { class: "lane-track", "aria-hidden": "true" }, fillOf, peak),
    most,
  );
  return { fillOf, peak, figure, most, element };
}

function fillLane(parts, ring) {
  parts.element.classList.toggle("is-ill", ring === undefined || !ring.has_producer || !ring.has_consumer);
  if (ring === undefined) {
    tell(parts.figure, "no ring");
    tell(parts.most, "");
    parts.fillOf.style.width = parts.peak.style.left = "0%";
    return;
  }
  // A logarithmic length: 1 of 16,384 is to be seen, and so is the rest of the way.
  const share = (depth) => `${(Math.log1p(depth) / Math.log1p(ring.capacity)) * 100}%`;
  const deepest = Math.max(...ring.depths);
  parts.fillOf.style.width = share(deepest);
  parts.peak.style.left = share(ring.high_water);
  tell(parts.figure, `${count(deepest)} of ${count(ring.capacity)}`);
  tell(parts.most, `peak ${count(ring.high_water)}`);
}
