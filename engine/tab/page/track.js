/** Things on one rank in order of their start, found by time. */

/** Index of the last element of `sorted` that is not above `value`; -1 where all are. */
export function lastAtMost(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** `indices` into parallel arrays `start` and `end`. No more than two overlap. */
export class Track {
  constructor(indices, start, end) {
    this.indices = indices.sort((a, b) => start[a] - start[b]);
    this.starts = Float64Array.from(this.indices, (i) => start[i]);
    this.end = end;
  }

  /** Those that cover `moment`: one at most, or the two of an overlapped pair. */
  covering(moment) {
    return this.between(moment, moment).filter((i) => this.end[i] > moment);
  }

  /** Those that begin before `to`, from the two that began last before `from`. */
  between(from, to) {
    const first = Math.max(0, lastAtMost(this.starts, from) - 1);
    return this.indices.slice(first, lastAtMost(this.starts, to) + 1);
  }
}

/** One track per rank, of those for which `wanted` holds. */
export function tracks(ranks, columns, wanted = () => true) {
  const members = Array.from({ length: ranks }, () => []);
  columns.start.forEach((_, i) => {
    if (wanted(i)) members[columns.rank[i]]?.push(i);
  });
  return members.map((indices) => new Track(indices, columns.start, columns.end));
}
