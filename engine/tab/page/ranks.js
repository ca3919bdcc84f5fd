/** Where each rank's step went: a line per rank, a bar of shares, and the figures, which add up to it. */

const COLUMNS = ["compute", "fill", "stall", "transfer", "reduce", "optimizer", "data", "drain", "other"];

export function rankTable(step, theme) {
  const found = COLUMNS.filter((name) => step.account.some((row) => row[step.names.indexOf(name)] > 0));
  const order = found.map((name) => step.names.indexOf(name));
  const head = ["", "step ms", "", ...found].map((name) => `<th>${swatch(theme, name)}${name}</th>`).join("");
  const rows = step.account.map((row, rank) => {
    const total = row.reduce((sum, ns) => sum + ns, 0);
    const bar = order.map((column) => part(theme, step.names[column], row[column], total)).join("");
    const cells = order.map((column) => cell(row[column], total)).join("");
    const named = `<th scope="row">${step.rowName(rank)}</th><td>${(total / 1e6).toFixed(1)}</td>`;
    return `<tr data-row="${rank}">${named}<td><div class="shares">${bar}</div></td>${cells}</tr>`;
  });
  return `<table class="ranks"><thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function swatch(theme, name) {
  return theme.names[name] ? `<i style="background:${theme.names[name]}"></i>` : "";
}

function part(theme, name, ns, total) {
  const width = (100 * ns) / Math.max(1, total);
  return `<i style="width:${width}%;background:${theme.names[name]}" title="${name} ${width.toFixed(1)} %"></i>`;
}

function cell(ns, total) {
  if (!ns) return '<td class="none">–</td>';
  return `<td>${(ns / 1e6).toFixed(1)} <small>${((100 * ns) / Math.max(1, total)).toFixed(0)} %</small></td>`;
}
