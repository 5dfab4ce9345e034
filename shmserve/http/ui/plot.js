// Lines over the last minute, drawn on a canvas. Colours are the style sheet's; the numbers are also in the legend, as text.

import { make } from "./dom.js";

const LEFT = 46;
const BOTTOM = 16;
const TOP = 6;
export const SPAN_MS = 60_000;

export class Plot {
  /**
   * `series`: [{ name, color: "--engine", fill: true, dash: [2, 3] }]; `write(value)`: a number with its unit; `least`: what the scale
   * shows at least; `isLog`: a scale of powers of ten.
   */
  constructor(figure, legend, { series, write, least = 4, isLog = false }) {
    this._canvas = figure.querySelector("canvas");
    this._series = series;
    this._write = write;
    this._least = least;
    this._isLog = isLog;
    this._values = series.map(() => make("span", { class: "legend-value" }));
    legend.append(
      ...series.map((each, i) =>
        make("span", { class: `legend-item${each.dash ? " is-dashed" : ""}` },
          make("span", { class: `swatch ${each.color.slice(2)}`, "aria-hidden": "true" }), `${each.name} `, this._values[i]),
      ),
    );
  }

  /** `times` (ms) ascending; `columns[i][k]` is the value of series i at times[k], null for a gap. */
  draw(times, columns, now) {
    columns.forEach((column, i) => {
      const last = column.length ? column[column.length - 1] : null;
      const text = last === null ? "–" : this._write(last);
      if (this._values[i].textContent !== text) this._values[i].textContent = text;
    });
    const { clientWidth: width, clientHeight: height } = this._canvas;
    if (!width || !height) return; // not shown
    const ratio = devicePixelRatio || 1;
    if (this._canvas.width !== Math.round(width * ratio)) this._canvas.width = Math.round(width * ratio);
    if (this._canvas.height !== Math.round(height * ratio)) this._canvas.height = Math.round(height * ratio);
    const pen = this._canvas.getContext("2d");
    const style = getComputedStyle(this._canvas);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const scale = this._isLog ? logScale(columns) : linearScale(columns, this._least);
    const y = (value) => TOP + (1 - scale.place(value)) * (height - TOP - BOTTOM);
    const x = (time) => LEFT + (1 - (now - time) / SPAN_MS) * (width - LEFT - 2);
    this._frame(pen, style, scale, y, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip(); // the oldest point lies beyond the axis
    this._series.forEach((series, i) => this._line(pen, style, series, times, columns[i], x, y, height - BOTTOM));
    pen.restore();
  }

  _frame(pen, style, scale, y, width, height) {
    pen.font = `10px ${style.getPropertyValue("--mono")}`;
    pen.lineWidth = 1;
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.fillStyle = style.getPropertyValue("--muted");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const tick of scale.ticks) {
      const at = Math.round(y(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(width, at);
      pen.stroke();
      pen.fillText(this._write(tick), LEFT - 6, at);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    pen.fillText("60 s ago", LEFT, height - 3);
    pen.textAlign = "right";
    pen.fillText("now", width - 2, height - 3);
  }

  _line(pen, style, series, times, column, x, y, floor) {
    const color = style.getPropertyValue(series.color);
    pen.strokeStyle = pen.fillStyle = color;
    pen.lineWidth = series.dash ? 1.1 : 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(series.dash ?? []);
    pen.globalAlpha = series.dash ? 0.65 : 1;
    for (const [from, to] of runs(column)) {
      pen.beginPath();
      for (let k = from; k < to; k++) pen.lineTo(x(times[k]), y(column[k]));
      if (to - from === 1) pen.lineTo(x(times[from]) + 1, y(column[from]));
      pen.stroke();
      if (series.fill) {
        pen.lineTo(x(times[to - 1]), floor);
        pen.lineTo(x(times[from]), floor);
        pen.globalAlpha = 0.14;
        pen.fill();
        pen.globalAlpha = 1;
      }
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }
}

/** [from, to) of the stretches without gaps. */
function runs(column) {
  const found = [];
  let from = -1;
  column.forEach((value, k) => {
    if (value !== null && from < 0) from = k;
    if (value === null && from >= 0) {
      found.push([from, k]);
      from = -1;
    }
  });
  if (from >= 0) found.push([from, column.length]);
  return found;
}

function extremes(columns) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return [low, high];
}

/** The next number of the kind 1, 2, 4 times a power of ten: its half is whole, too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((digit) => digit * power).find((each) => each >= value * 0.999);
}

function linearScale(columns, least) {
  const [, high] = extremes(columns);
  const top = roundUp(Math.max(high * 1.05, least));
  return { ticks: [0, top / 2, top], place: (value) => Math.min(1, value / top) };
}

function logScale(columns) {
  let [low, high] = extremes(columns);
  if (low > high) [low, high] = [1_000, 10_000];
  const first = Math.floor(Math.log10(Math.max(low, 1)) + 0.001);
  const last = Math.max(first + 1, Math.ceil(Math.log10(Math.max(high, 1)) - 0.001));
  const ticks = [];
  for (let power = first; power <= last; power++) {
    ticks.push(10 ** power);
    if (last - first === 1 && power === first) ticks.push(2 * 10 ** power, 5 * 10 ** power);
  }
  return { ticks, place: (value) => Math.max(0, (Math.log10(Math.max(value, 1)) - first) / (last - first)) };
}
