// One answer's intervals as a row of bars, a bar a piece; where there are more pieces than bars, the longest of each group.

import { makeSvg } from "./dom.js";

const MOST_BARS = 160;
const HEIGHT = 28;

/** An SVG of `intervals` (ms). The scale ends at four usual intervals or at p99; what is longer reaches the top and is marked. */
export function sparkline(intervals, usual, p99) {
  const size = Math.max(1, Math.ceil(intervals.length / MOST_BARS));
  const groups = [];
  for (let i = 0; i < intervals.length; i += size) groups.push(Math.max(...intervals.slice(i, i + size)));
  const top = Math.max(usual * 4, p99, 1e-3);
  const width = Math.max(40, groups.length);
  const bars = [];
  const late = [];
  groups.forEach((interval, i) => {
    const y = HEIGHT - 1 - Math.min(1, interval / top) * (HEIGHT - 3);
    (interval > top ? late : bars).push(`M${i + 0.5} ${HEIGHT}V${y.toFixed(2)}`);
  });
  const middle = (HEIGHT - 1 - (usual / top) * (HEIGHT - 3)).toFixed(2);
  return makeSvg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    makeSvg("path", { class: "spark-bars", d: bars.join("") }),
    makeSvg("path", { class: "spark-late", d: late.join("") }),
    makeSvg("path", { class: "spark-usual-line", d: `M0 ${middle}H${width}` }),
  );
}
