// What the policies did, in a table: one row for each place that can be full.

import { make, tell } from "./dom.js";
import { bytes, count, many, span } from "./stats.js";

export class Policies {
  constructor(table) {
    this._body = table.querySelector("tbody");
    this._rows = new Map();
  }

  draw(sample, constants) {
    const ofRings = (kind, name) => total(sample.rings.filter((ring) => ring.kind === kind), (ring) => ring[name]);
    const ofFronts = (name) => total(sample.processes.filter((each) => each.role === "http"), (each) => each.words[name] ?? 0);
    const ofWorkers = (name) => total(sample.processes.filter((each) => each.role === "worker"), (each) => each.words[name] ?? 0);
    const { policies, limits } = constants;
    this._row("token ring", policies.token, [
      [ofRings("tokens", "coalesced"), (n) => `${count(n)} merged`],
      [ofWorkers("paused"), (n) => `${many(n, "sequence")} paused now`],
      [ofRings("tokens", "dropped"), (n) => `${count(n)} dropped`],
      [ofRings("tokens", "blocked_ns"), (n) => `waited ${span(n / 1e3)}`],
    ]);
    this._row("submit ring", policies.submit, [
      [ofRings("submit", "refused"), (n) => `${many(n, "time")} full`],
      [ofFronts("num_refused_submit_ring"), (n) => `${many(n, "request")} refused`],
    ]);
    this._row("slow client", policies.slow_client, [
      [ofFronts("clients_congested"), (n) => `${count(n)} stuck now`],
      [ofFronts("client_backlog_bytes"), (n) => `${bytes(n)} wait`],
      [ofFronts("num_congestions"), (n) => `${many(n, "congestion")}`],
      [ofFronts("num_client_coalesced_tokens"), (n) => `${many(n, "token")} merged`],
      [ofFronts("num_clients_paused"), (n) => `${count(n)} paused`],
      [ofFronts("num_clients_dropped"), (n) => `${count(n)} cut`],
    ]);
    this._row(
      "queue",
      `refuse past ${count(limits.max_queued_requests)}`,
      constants.refusals.map((reason) => [
        ofFronts(`num_refused_${reason}`),
        (n) => `${count(n)} refused: ${reason.replaceAll("_", " ")}`,
      ]),
    );
    this._row("KV blocks", "preempt, recompute", [[ofWorkers("num_preempted"), (n) => `${count(n)} preempted`]]);
    this._row("this panel", "newest sample only", [[ofFronts("num_debug_skipped"), (n) => `${many(n, "sample")} skipped`]]);
  }

  _row(place, policy, facts) {
    if (!this._rows.has(place)) {
      const row = [make("th", { scope: "row", text: place }), make("td", { class: "policy" }), make("td")];
      this._rows.set(place, row);
      this._body.append(make("tr", {}, ...row));
    }
    const [, named, did] = this._rows.get(place);
    const told = facts.filter(([value]) => value > 0).map(([value, write]) => write(value));
    tell(named, policy);
    tell(did, told.join(", ") || "nothing yet");
    did.classList.toggle("is-idle", !told.length);
  }
}

function total(list, of) {
  return list.reduce((all, each) => all + of(each), 0);
}
