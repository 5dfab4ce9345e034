// Numbers: quantiles of lists and of histograms, and how they are written.

/** The q-quantile of a sorted list, by linear interpolation; null of an empty one. */
export function quantile(sorted, q) {
  if (!sorted.length) return null;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

/** The q-quantile of counts by bucket; counts has one entry more than `bounds`, for what lies above. null if it is empty. */
export function quantileOf(bounds, counts, q) {
  let total = 0;
  for (const count of counts) total += count;
  if (!total) return null;
  let left = q * total;
  for (let i = 0; i < bounds.length; i++) {
    if (counts[i] && left <= counts[i]) {
      const from = i ? bounds[i - 1] : 0;
      return from + (bounds[i] - from) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}

export function sum(lists) {
  const total = [];
  for (const list of lists) list.forEach((value, i) => (total[i] = (total[i] ?? 0) + value));
  return total;
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return grouped.format(value);
}

/** A number of things, and their word in the right number. */
export function many(value, word, plural = `${word}s`) {
  return `${count(value)} ${value === 1 ? word : plural}`;
}

/** Microseconds for people: "820 µs", "4.52 ms", "1.20 s". */
export function span(us) {
  if (us === null || us === undefined) return "–";
  if (us === 0) return "0";
  if (us < 1_000) return `${us.toFixed(0)} µs`;
  if (us < 10_000) return `${(us / 1e3).toFixed(2)} ms`;
  if (us < 1_000_000) return `${(us / 1e3).toFixed(us < 100_000 ? 1 : 0)} ms`;
  return `${(us / 1e6).toFixed(us < 1e7 ? 2 : 0)} s`;
}

export function bytes(value) {
  if (value < 1_024) return `${value} B`;
  if (value < 1_048_576) return `${(value / 1_024).toFixed(0)} KiB`;
  return `${(value / 1_048_576).toFixed(1)} MiB`;
}
