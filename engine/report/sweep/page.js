"use strict";
// Sorting the table of jobs, drawing the charts, and lighting up a job wherever it is drawn. Tables need no script.
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

// -- charts -----------------------------------------------------------------------------------------------------------

const charts = JSON.parse(document.querySelector("#charts").textContent);
const places = [...document.querySelectorAll(".chart")];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const CONFIG = {
  displaylogo: false,
  responsive: true,
  showSendToCloud: false, // nothing of a sweep leaves the page
  plotlyServerURL: "",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d"],
};
const LIFT = 0.22; // of white in a series' colour on dark paper

/** A colour of a series as it is drawn on the present paper. */
function lifted(colour) {
  if (!dark.matches || !/^#[0-9a-f]{6}$/.test(colour)) return colour;
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgb(${parts.map((part) => Math.round(part + LIFT * (255 - part)))})`;
}

/** A chart in the colours of the page. */
function dressed({ data, layout }) {
  const own = getComputedStyle(document.documentElement);
  const [ink, quiet, line, card] = ["ink", "quiet", "line", "card"].map((name) => own.getPropertyValue(`--${name}`));
  const look = structuredClone(layout);
  Object.assign(look, { paper_bgcolor: "transparent", plot_bgcolor: "transparent" });
  look.font = { color: ink, size: 12, family: own.fontFamily };
  look.modebar = { bgcolor: "transparent", color: quiet, activecolor: ink };
  look.hoverlabel = { bgcolor: card, bordercolor: line, font: { color: ink }, align: "left" };
  for (const name of Object.keys(look).filter((key) => /^[xy]axis/.test(key))) {
    Object.assign(look[name], { gridcolor: line, zerolinecolor: line, tickfont: { color: quiet }, automargin: true });
    look[name].title = { ...look[name].title, font: { color: quiet, size: 12 }, standoff: 6 };
  }
  const traces = structuredClone(data);
  for (const { marker, line: stroke } of traces) {
    if (marker) marker.color = lifted(marker.color);
    if (stroke && typeof stroke.color === "string") stroke.color = lifted(stroke.color);
  }
  return [traces, look];
}

const rowOf = (job) => document.getElementById(`job${job}`);

function light(job, on) {
  for (const each of document.querySelectorAll(`[data-job="${job}"]`)) each.classList.toggle("lit", on);
}

/** Where a job is on a chart: [{ curveNumber, pointNumber }, ...]. */
function pointsOf({ data }, job) {
  return data.flatMap(({ type, customdata }, curveNumber) => {
    if (type === "heatmap" || !Array.isArray(customdata)) return [];
    return customdata.flatMap((one, pointNumber) => (one === job ? [{ curveNumber, pointNumber }] : []));
  });
}

const panelOf = ({ xaxis = "x", yaxis = "y" }) => xaxis + yaxis;

async function draw(place) {
  await Plotly.newPlot(place, ...dressed(charts[place.dataset.chart]), CONFIG);
  const jobOf = ({ points: [point] }) => point?.customdata;
  place.on("plotly_hover", (event) => light(jobOf(event), true));
  place.on("plotly_unhover", (event) => light(jobOf(event), false));
  place.on("plotly_click", (event) => {
    if (rowOf(jobOf(event))) location.hash = `job${jobOf(event)}`;
  });
  place.dataset.drawn = "";
}

const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      draw(target);
    }
  },
  { rootMargin: "600px" },
);
places.forEach((place) => near.observe(place));
const drawn = () => places.filter((place) => "drawn" in place.dataset);
dark.addEventListener("change", () => {
  for (const place of drawn()) Plotly.react(place, ...dressed(charts[place.dataset.chart]), CONFIG);
});
addEventListener("beforeprint", () => places.filter((place) => !("drawn" in place.dataset)).forEach(draw));

// Pointing at a job in the table or on a card shows it on the charts.
const point = (event, on) => {
  const job = event.target.closest?.("[data-job]")?.dataset.job;
  if (job === undefined) return;
  light(job, on);
  for (const place of drawn()) {
    const points = on ? pointsOf(charts[place.dataset.chart], Number(job)) : [];
    const panels = points.map(({ curveNumber }) => panelOf(charts[place.dataset.chart].data[curveNumber]));
    if (points.length) Plotly.Fx.hover(place, points, [...new Set(panels)]);
    else Plotly.Fx.unhover(place);
  }
};
document.addEventListener("mouseover", (event) => point(event, true));
document.addEventListener("mouseout", (event) => point(event, false));
