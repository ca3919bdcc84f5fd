/** Where each rank's step went: a line per rank, a bar of shares, and the figures in ms, which add up to the step. */

import { share } from "./words.js";

/** A name under which no rank spent anything has no column. */
export function rankTable(step, theme) {
  const found = step.names.map((_, column) => column).filter((column) => step.account.some((row) => row[column] > 0));
  const swatch = (name) => `<th><i style="background:${theme.names[name]}"></i>${name}</th>`;
  const head = `<th></th><th>step ms</th><th></th>${found.map((column) => swatch(step.names[column])).join("")}`;
  const rows = step.account.map((row, rank) => {
    const total = row.reduce((sum, ns) => sum + ns, 0);
    const bar = found.map((column) => part(theme, step.names[column], row[column], total)).join("");
    const cells = found.map((column) => cell(row[column], total)).join("");
    const named = `<th scope="row">${step.rowName(rank)}</th><td>${(total / 1e6).toFixed(1)}</td>`;
    return `<tr>${named}<td><div class="shares">${bar}</div></td>${cells}</tr>`;
  });
  return `<table class="ranks"><thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function part(theme, name, ns, total) {
  const look = `width:${(100 * ns) / Math.max(1, total)}%;background:${theme.names[name]}`;
  return `<i style="${look}" title="${name} ${share(ns, total)}"></i>`;
}

function cell(ns, total) {
  return ns ? `<td title="${share(ns, total)}">${(ns / 1e6).toFixed(1)}</td>` : '<td class="none">–</td>';
}
