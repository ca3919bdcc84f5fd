"use strict";
// Sorting the table of jobs, and lighting up a job wherever it is drawn. The page is whole without this.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const sort = (column) => {
    const head = heads[column];
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      const told = cell.dataset.value ?? cell.textContent;
      return { text: cell.textContent, number: told === "" ? NaN : Number(told) };
    };
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      const missing = (k) => Number.isNaN(k.number) && k.text === "-";
      if (missing(a) || missing(b)) return missing(a) - missing(b); // always last
      const both = !Number.isNaN(a.number) && !Number.isNaN(b.number);
      const order = both ? a.number - b.number : a.text.localeCompare(b.text, undefined, { numeric: true });
      return down ? -order : order;
    });
    rows.forEach(([, row]) => body.append(row));
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort(column));
  });
}
const light = (event, on) => {
  const job = event.target.closest?.("[data-job]")?.dataset.job;
  if (job === undefined) return;
  for (const each of document.querySelectorAll(`[data-job="${job}"]`)) each.classList.toggle("lit", on);
};
document.addEventListener("mouseover", (event) => light(event, true));
document.addEventListener("mouseout", (event) => light(event, false));
