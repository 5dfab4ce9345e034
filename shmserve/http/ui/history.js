// The last minute of samples, as the columns that the panel shows. Histograms only grow: what a sample adds is its difference to the one
// before it of the same process, and a process that was started anew begins from nothing.

import { SPAN_MS } from "./plot.js";
import { quantileOf, sum } from "./stats.js";

export const HOPS = ["hop_publish_us", "hop_pop_us", "hop_frame_us", "hop_write_us"];
const DIFFERENCED = [...HOPS, "itl_wire_us", "itl_engine_us"];
const GAP_MS = 1_500; // longer without a sample is a gap in the lines
const RECENT_MS = 10_000;

export class History {
  constructor(bounds) {
    this._bounds = bounds;
    this._before = new Map(); // "worker0.3.itl_engine_us" -> counts
    this._words = new Map(); // for rates
    this.points = [];
  }

  /** Take a sample in; returns the point that it became. */
  add(sample) {
    const time = sample.time_ms;
    const last = this.points[this.points.length - 1];
    if (last !== undefined && time - last.time > GAP_MS) this.points.push({ time: last.time + 1, isGap: true });
    const added = this._differences(sample.processes);
    const workers = sample.processes.filter((each) => each.role === "worker");
    const fronts = sample.processes.filter((each) => each.role === "http");
    const word = (processes, name) => processes.reduce((total, each) => total + (each.words[name] ?? 0), 0);
    const depth = (kind) => Math.max(0, ...sample.rings.filter((ring) => ring.kind === kind).flatMap((ring) => ring.depths));
    const point = {
      time,
      added,
      tokens: depth("tokens"),
      submit: depth("submit"),
      running: word(workers, "running"),
      waiting: word(fronts, "waiting"),
      engine: this._quantiles(added, "itl_engine_us"),
      wire: this._quantiles(added, "itl_wire_us"),
      generated: this._rate("generation_tokens", workers, time),
      framed: this._rate("frames", fronts, time),
    };
    this.points.push(point);
    while (this.points.length && time - this.points[0].time > SPAN_MS + 1_000) this.points.shift();
    return point;
  }

  get times() {
    return this.points.map((point) => point.time);
  }

  /** One column of the lines; a gap is null. */
  column(of) {
    return this.points.map((point) => (point.isGap ? null : of(point)));
  }

  /** { p50, p99 } of one histogram over the last seconds. */
  recent(name) {
    const since = this.points.length ? this.points[this.points.length - 1].time - RECENT_MS : 0;
    const counts = sum(this.points.filter((point) => !point.isGap && point.time > since).map((point) => point.added[name] ?? []));
    return this._of(name, counts);
  }

  _quantiles(added, name) {
    return this._of(name, added[name] ?? []);
  }

  _of(name, counts) {
    const bounds = this._bounds[name];
    return { p50: quantileOf(bounds, counts, 0.5), p99: quantileOf(bounds, counts, 0.99) };
  }

  _differences(processes) {
    const added = {};
    const now = new Map();
    for (const process of processes) {
      for (const name of DIFFERENCED) {
        const counts = process.histograms[name]?.counts;
        if (counts === undefined) continue;
        const key = `${process.role}${process.index}.${process.epoch}.${name}`;
        const before = this._before.get(key);
        now.set(key, counts);
        if (before === undefined) continue; // what it counted before we looked is not of this minute
        added[name] = sum([added[name] ?? [], counts.map((value, i) => value - before[i])]);
      }
    }
    this._before = now;
    return added;
  }

  /** How much the sum of a word grew, a second; null where that is unknown. */
  _rate(name, processes, time) {
    const key = processes.map((each) => `${each.index}.${each.epoch}`).join();
    const total = processes.reduce((all, each) => all + (each.words[name] ?? 0), 0);
    const before = this._words.get(name);
    this._words.set(name, { key, total, time });
    if (before === undefined || before.key !== key || time <= before.time || time - before.time > GAP_MS) return null;
    return ((total - before.total) / (time - before.time)) * 1e3;
  }
}
