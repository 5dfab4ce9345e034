// The panel of the boundary: draws what history.js has of each sample. Shows; decides nothing.

import { byId, make, tell } from "./dom.js";
import { History, HOPS } from "./history.js";
import { Lanes } from "./lanes.js";
import { Plot } from "./plot.js";
import { Policies } from "./policies.js";
import { count, many, span } from "./stats.js";

const HOP_NAMES = {
  hop_publish_us: ["sampled → published", "engine"],
  hop_pop_us: ["published → popped", "ink"],
  hop_frame_us: ["popped → framed", "wire"],
  hop_write_us: ["framed → written", "wire"],
};
const HOP_DECADES = [1, 1e6]; // the bars' scale, µs: 1 µs to 1 s
const HOP_BOUND = 50; // µs: the least that the hops' histograms tell apart
const LABEL_EVERY_MS = 5_000; // what a screen reader is told of a plot changes no more often

export class Boundary {
  constructor(constants) {
    this._constants = constants;
    this._history = new History(constants.bounds_us);
    for (const id of ["lanes", "processes", "hops", "kv", "legend-depth", "legend-itl", "legend-load"]) byId(id).replaceChildren();
    byId("policies").querySelector("tbody").replaceChildren();
    this._lanes = new Lanes(byId("lanes"));
    this._policies = new Policies(byId("policies"));
    this._depth = new Plot(byId("plot-depth"), byId("legend-depth"), {
      series: [
        { name: "tokens", color: "--engine", fill: true },
        { name: "submit", color: "--wire", fill: true },
      ],
      write: short,
    });
    this._itl = new Plot(byId("plot-itl"), byId("legend-itl"), {
      series: [
        { name: "engine", color: "--engine" },
        { name: "p99", color: "--engine", dash: [2, 3] },
        { name: "wire", color: "--wire" },
        { name: "p99", color: "--wire", dash: [2, 3] },
      ],
      write: tidy,
      isLog: true,
    });
    this._load = new Plot(byId("plot-load"), byId("legend-load"), {
      series: [
        { name: "running", color: "--engine", fill: true },
        { name: "waiting", color: "--wire", fill: true },
      ],
      write: short,
    });
    this._hops = HOPS.map((name) => hopRow(byId("hops"), ...HOP_NAMES[name]));
    this._kv = kvRow(byId("kv"));
    this._labelledAt = 0;
  }

  draw(sample) {
    const point = this._history.add(sample);
    this._lanes.draw(sample, this._constants, point);
    this._policies.draw(sample, this._constants);
    this._tellProcesses(sample);
    const history = this._history;
    const { times } = history;
    const now = point.time;
    this._depth.draw(times, [history.column((each) => each.tokens), history.column((each) => each.submit)], now);
    this._itl.draw(
      times,
      [
        history.column((each) => each.engine.p50),
        history.column((each) => each.engine.p99),
        history.column((each) => each.wire.p50),
        history.column((each) => each.wire.p99),
      ],
      now,
    );
    this._load.draw(times, [history.column((each) => each.running), history.column((each) => each.waiting)], now);
    HOPS.forEach((name, i) => fillHop(this._hops[i], history.recent(name)));
    this._tellKv(sample);
    if (now - this._labelledAt > LABEL_EVERY_MS) {
      this._labelledAt = now;
      this._label(point);
    }
  }

  _tellProcesses(sample) {
    const words = sample.processes.find((each) => each.role === "supervisor")?.words ?? {};
    const restarts = Object.entries(words)
      .filter(([name, value]) => value > 0 && name.includes("_restarts_"))
      .map(([name, value]) => {
        const [role, cause] = name.split("_restarts_");
        return `${role === "http" ? "front end" : role} restarted ${many(value, "time")} (${cause})`;
      });
    const lag = Math.max(0, ...sample.processes.filter((each) => each.role === "http").map((each) => each.words.loop_lag_ns));
    const runner = this._constants.runner === "auto" ? [] : [`${this._constants.runner} runner`];
    const facts = [...runner, `event loop late by ${span(lag / 1e3)}`, ...restarts];
    tell(byId("processes"), facts.join(" · "));
  }

  _tellKv(sample) {
    const workers = sample.processes.filter((each) => each.role === "worker");
    const word = (name) => workers.reduce((all, each) => all + each.words[name], 0);
    const used = word("kv_blocks_used");
    const total = word("kv_blocks_total");
    const asked = word("prefix_query_tokens");
    this._kv.bar.style.width = total ? `${(used / total) * 100}%` : "0%";
    const share = total ? ` (${((used / total) * 100).toFixed(used / total < 0.1 ? 1 : 0)} %)` : "";
    const reuse = asked ? `; ${((word("prefix_hit_tokens") / asked) * 100).toFixed(0)} % of prompt tokens were there before` : "";
    tell(this._kv.text, `${count(used)} of ${many(total, "block")} in use${share}${reuse}`);
  }

  _label(point) {
    const label = (id, text) => byId(id).querySelector("canvas").setAttribute("aria-label", text);
    label("plot-depth", `Ring depth over the last minute. Now: tokens ${point.tokens}, submit ${point.submit}.`);
    const itl = ({ p50, p99 }) => (p50 === null ? "no tokens" : `median ${span(p50)}, p99 ${span(p99)}`);
    label("plot-itl", `Inter-token latency over the last minute. Now: engine ${itl(point.engine)}; wire ${itl(point.wire)}.`);
    label("plot-load", `Sequences over the last minute. Now: ${point.running} running, ${point.waiting} waiting.`);
  }
}

function hopRow(parent, name, side) {
  const bar = make("span", { class: `hop-bar ${side}` });
  const far = make("span", { class: `hop-far ${side}` });
  const text = make("span", { class: "hop-text" });
  parent.append(
    make("div", { class: "hop" }, make("span", { class: "hop-name", text: name }),
      make("span", { class: "hop-track", "aria-hidden": "true" }, far, bar), text),
  );
  return { bar, far, text };
}

function fillHop({ bar, far, text }, { p50, p99 }) {
  const share = (us) => (us === null ? "0%" : `${Math.max(0, Math.min(1, Math.log10(Math.max(us, HOP_DECADES[0])) / Math.log10(HOP_DECADES[1]))) * 100}%`);
  bar.style.width = share(p50);
  far.style.width = share(p99);
  tell(text, p50 === null ? "–" : `${atLeast(p50)} · ${atLeast(p99)}`);
}

/** Below the first bound of its histogram a time is not known any better. */
function atLeast(us) {
  return us < HOP_BOUND ? `<${span(HOP_BOUND)}` : span(us);
}

function kvRow(parent) {
  const bar = make("span", { class: "kv-bar" });
  const text = make("p", { class: "kv-text" });
  parent.append(make("div", { class: "kv-track", "aria-hidden": "true" }, bar), text);
  return { bar, text };
}

/** For axes: no more digits than it takes. */
function tidy(us) {
  if (us >= 1e6) return `${us / 1e6 >= 10 ? (us / 1e6).toFixed(0) : Number((us / 1e6).toFixed(1))} s`;
  if (us >= 1e3) return `${us / 1e3 >= 100 ? (us / 1e3).toFixed(0) : Number((us / 1e3).toFixed(1))} ms`;
  return `${us.toFixed(0)} µs`;
}

function short(value) {
  if (value >= 10_000) return `${(value / 1e3).toFixed(0)}k`;
  return Number.isInteger(value) ? count(value) : value.toFixed(1);
}
