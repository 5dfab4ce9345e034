// One answer as it arrives: its pieces, each with the time since the one before, and the account of it at the end.
//
// What is measured is the wire as this browser saw it: the moment at which each event was here. Two events of one read came together;
// the second has an interval of 0. An event is a piece; it holds one token unless the server merged several.

import { make, tell } from "./dom.js";
import { sparkline } from "./sparkline.js";
import { many, quantile, span } from "./stats.js";
import { pointOut } from "./tip.js";

const HEATS = [1.5, 2, 4, 8]; // times the usual interval at which a piece gets the next heat
const FEWEST_FOR_HEAT = 4;
const MOST_TOGETHER = 0.9; // fewer reads than this share of the pieces are told of: the intervals then say more of the way than of the server
const REDRAW_MS = 250;

export class Answer {
  constructor(transcript, askedAt) {
    this.text = ""; // what the model said, without its reasoning
    this.intervals = [];
    this._askedAt = askedAt;
    this._firstAt = null;
    this._lastAt = askedAt;
    this._drawnAt = 0;
    this._numReads = 0; // moments at which something came: fewer than pieces where several came together
    this._spans = [];
    this._timed = []; // [span, ms] of every piece but the first
    this._sorted = [];
    this._total = 0;
    this._isOver = false;
    this._pieces = make("div", {
      class: "pieces waiting",
      tabindex: "0",
      role: "group",
      "aria-label": "Answer. Left and right arrow keys go through its pieces and tell their times.",
    });
    this._figures = make("p", { class: "figures" });
    this._spark = make("div", { class: "spark-frame" });
    this._account = make("footer", { class: "account", hidden: "" }, this._spark, this._figures);
    this.element = make(
      "article",
      { class: "message of-model" },
      make("h3", { class: "unseen", text: "Model" }),
      this._pieces,
      this._account,
    );
    this._pieces.addEventListener("keydown", (event) => this._onKey(event));
    this._pieces.addEventListener("pointerover", (event) => this._point(event.target));
    this._pieces.addEventListener("focusin", (event) => this._point(event.target));
    this._pieces.addEventListener("pointerleave", () => pointOut(null));
    this._pieces.addEventListener("focusout", () => pointOut(null));
    transcript.append(this.element);
  }

  /** One event's text, which was here `at`. */
  add(text, at, { isThought = false } = {}) {
    const element = make("span", { class: "tok h0", text });
    if (isThought) element.classList.add("thought");
    else this.text += text;
    if (at !== this._lastAt) this._numReads += 1;
    if (this._firstAt === null) {
      this._firstAt = at;
      this._pieces.classList.remove("waiting");
      element.dataset.told = `first piece, ${span((at - this._askedAt) * 1e3)} after the question`;
    } else {
      const interval = at - this._lastAt;
      this.intervals.push(interval);
      this._insert(interval);
      this._timed.push([element, interval]);
      this._heat(element, interval, this._usual);
    }
    this._lastAt = at;
    this._spans.push(element);
    this._pieces.append(element);
    if (at - this._drawnAt >= REDRAW_MS) {
      this._drawnAt = at;
      this._tellAccount();
    }
  }

  /** It is over: `how` in a few words, and the server's count of its tokens if it came. */
  end(how, numTokens = null) {
    this._isOver = true;
    this._pieces.classList.remove("waiting");
    const usual = this._usual;
    for (const [element, interval] of this._timed) this._heat(element, interval, usual);
    this._tellAccount(how, numTokens);
  }

  /** It ended with an error. */
  fail(message, onRetry) {
    const retry = make("button", { type: "button", class: "quiet", text: "Try again" });
    retry.addEventListener("click", onRetry);
    this.element.append(make("div", { class: "failure", role: "alert" }, make("p", { text: message }), retry));
  }

  get hasText() {
    return this._firstAt !== null;
  }

  /** What an interval is measured against: the median, or half the mean where so many came together that it says nothing. */
  get _usual() {
    if (this._sorted.length < FEWEST_FOR_HEAT) return 0;
    return Math.max(quantile(this._sorted, 0.5), this._total / this._sorted.length / 2);
  }

  _insert(interval) {
    this._total += interval;
    let low = 0;
    let high = this._sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this._sorted[middle] < interval) low = middle + 1;
      else high = middle;
    }
    this._sorted.splice(low, 0, interval);
  }

  _heat(element, interval, usual) {
    const times = usual > 0 ? interval / usual : 1;
    const heat = HEATS.filter((least) => times >= least).length;
    element.className = element.className.replace(/\bh\d\b/, `h${heat}`);
    if (interval === 0) element.dataset.told = "together with the piece before";
    else element.dataset.told = `+${span(interval * 1e3)}` + (usual > 0 ? `, ${times.toFixed(1)}× the usual` : "");
  }

  _tellAccount(how = "", numTokens = null) {
    const figures = [];
    if (this._firstAt !== null) figures.push(["first", span((this._firstAt - this._askedAt) * 1e3)]);
    if (this._sorted.length) {
      const median = quantile(this._sorted, 0.5);
      const p99 = quantile(this._sorted, 0.99);
      const seconds = (this._lastAt - this._firstAt) / 1e3;
      figures.push(["p50", span(median * 1e3)], ["p99", span(p99 * 1e3)]);
      if (seconds > 0) figures.push(["rate", `${(this.intervals.length / seconds).toFixed(0)}/s`]);
      this._spark.replaceChildren(sparkline(this.intervals, this._usual || median, p99));
    }
    const shown = numTokens ?? this._spans.length;
    const merged = numTokens !== null && numTokens > this._spans.length + 1; // the end has a token without text
    figures.push(["", merged ? `${many(shown, "token")} in ${many(this._spans.length, "piece")}` : many(shown, "token")]);
    if (this._numReads < this._spans.length * MOST_TOGETHER) figures.push(["", `arrived in ${many(this._numReads, "read")}`]);
    if (how) figures.push(["", how]);
    this._account.hidden = false;
    this._figures.replaceChildren(
      ...figures.flatMap(([name, value]) => [
        make("span", { class: "figure" }, ...(name ? [make("span", { class: "figure-name", text: name }), " "] : []), value),
        " ",
      ]),
    );
  }

  _point(target) {
    if (target instanceof HTMLElement && target.classList.contains("tok")) pointOut(target);
    else pointOut(null);
  }

  _onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const isEnd = event.key === "Home" || event.key === "End";
    if ((step === undefined && !isEnd) || !this._spans.length || event.altKey || event.ctrlKey || event.metaKey) return;
    const here = this._spans.indexOf(document.activeElement);
    const last = this._spans.length - 1;
    let next = event.key === "Home" ? 0 : event.key === "End" ? last : here + step;
    if (here < 0 && step === -1) next = last;
    const goal = this._spans[Math.max(0, Math.min(last, next))];
    goal.tabIndex = -1;
    goal.focus();
    event.preventDefault();
  }
}

/** What a person said. */
export function question(transcript, text) {
  const said = make("p", { class: "said" });
  tell(said, text);
  const element = make("article", { class: "message of-user" }, make("h3", { class: "unseen", text: "You" }), said);
  transcript.append(element);
  return element;
}
