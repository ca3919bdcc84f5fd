/**
 * The page of the tab: one run, or two below each other on one time axis. TensorBoard imports this module into a frame
 * and calls `render`. Nothing is loaded but what stands beside this file, and the data of the runs.
 */

import { fetchRuns } from "./api.js";
import { savePng, saveSvg, saveTrace } from "./export.js";
import { Sight } from "./gestures.js";
import { legend } from "./legend.js";
import { Panel } from "./panel.js";
import { learn, themeOf, watchTheme } from "./theme.js";

const POLL_MS = 5000; // how often a run that is still going on is asked for new steps
const PLAY_MS = 9000; // how long playing takes what is in sight
const ZOOM = 1.5; // per key press
const KEYS = { p: "prediction", c: "critical", b: "causes" };

const FRAME = `
  <header class="bar">
    <button data-do="play" title="play what is in sight (space)">play</button>
    <button data-toggle="prediction" title="overlay the prediction (p)">prediction</button>
    <button data-toggle="critical" title="mark the critical path (c)">critical path</button>
    <button data-toggle="causes" title="shade bubbles by what they were spent on (b)">causes</button>
    <span class="group">
      <button data-do="out" title="zoom out (−)">−</button>
      <button data-do="fit" title="the whole step (0)">fit</button>
      <button data-do="in" title="zoom in (+)">+</button>
    </span>
    <button data-do="compare" title="a second run below the first, on the same axis">compare</button>
    <span class="group export">save
      <button data-do="svg">SVG</button>
      <button data-do="png">PNG</button>
      <button data-do="trace" title="open it at ui.perfetto.dev">Perfetto</button>
    </span>
    <span class="legend"></span>
  </header>
  <p class="said" role="status"></p>
  <main></main>
  <div class="tip" role="tooltip" hidden></div>`;

class Page {
  constructor(root) {
    this.root = root;
    root.innerHTML = FRAME;
    this.sight = new Sight();
    this.options = { prediction: true, critical: false, causes: true };
    this.runs = [];
    this.panels = [];
    this.moment = null;
    this.mode = watchTheme((mode) => this.dress(mode));
    this.actions = {
      play: () => this.play(),
      in: () => this.zoom(1 / ZOOM),
      out: () => this.zoom(ZOOM),
      fit: () => this.zoom(Infinity),
      compare: () => this.compare(),
      svg: () => this.save(saveSvg),
      png: () => this.save(savePng),
      trace: () => this.first && saveTrace(this.fileName(), this.first.run, this.first.step.step),
    };
    root.addEventListener("click", (event) => this.press(event.target.dataset));
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(([{ contentRect }]) => this.fitTo(contentRect.width)).observe(root);
  }

  /** The panel that keys and exports are about. */
  get first() {
    return this.panels.find(({ step }) => step);
  }

  /** The step that a panel's figures are compared with: that of the first, for all below it. */
  against(panel) {
    return panel === this.panels[0] ? undefined : this.panels[0].step;
  }

  async start() {
    await this.poll();
    setInterval(() => document.hidden || this.poll(), POLL_MS);
  }

  async poll() {
    try {
      const { palette, runs } = await fetchRuns();
      const before = this.runs;
      this.runs = runs;
      if (!this.palette) {
        this.palette = palette;
        this.dress(this.mode);
      }
      if (runs.length && !this.panels.length) await this.open(runs[0].name);
      await Promise.all(this.panels.map((panel) => panel.renew(before)));
      this.say(runs.length ? "" : "No run here has a traced step yet: trace.every=1 or more writes them as it trains.");
    } catch (error) {
      this.say(`The server does not answer: ${error.message}`);
    }
  }

  async open(run) {
    const section = document.createElement("section");
    this.root.querySelector("main").append(section);
    const panel = new Panel(this, section);
    this.panels.push(panel);
    await panel.renew(this.runs);
    await panel.choose(run);
  }

  /** A second run, by default the next in the list; or back to one. */
  async compare() {
    if (this.panels.length > 1) {
      this.panels.pop().root.remove();
      return this.shown();
    }
    if (!this.runs.length) return;
    const at = this.runs.findIndex(({ name }) => name === this.panels[0].run);
    await this.open(this.runs[(at + 1) % this.runs.length].name);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  dress(mode) {
    this.mode = mode;
    document.documentElement.dataset.theme = mode;
    if (!this.palette) return;
    this.theme = themeOf(mode, this.palette);
    this.shown();
  }

  /** A document may name what this server does not know. */
  learn(document) {
    learn(this.palette, document);
    this.theme = themeOf(this.mode, this.palette);
  }

  /** The page grows and shrinks with what it says; only its width makes a difference to what is drawn. */
  fitTo(width) {
    if (width !== this.width) this.shown();
    this.width = width;
  }

  /** Another step, size or theme: everything is drawn anew. */
  shown() {
    if (!this.theme) return;
    this.sight.reach(Math.max(1, ...this.panels.map(({ step }) => step?.end ?? 1)));
    this.panels.forEach((panel) => panel.drawRest());
    const steps = this.panels.map(({ step }) => step).filter(Boolean);
    this.root.querySelector(".legend").innerHTML = legend(this.palette, this.options, steps);
    for (const button of this.root.querySelectorAll("[data-toggle]")) {
      button.setAttribute("aria-pressed", this.options[button.dataset.toggle]);
    }
    this.moved();
  }

  /** The sight or what is pointed at has changed: timelines are drawn with the next frame. */
  moved() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.panels.forEach((panel) => panel.draw());
    });
  }

  tip(html, event) {
    const tip = this.root.querySelector(".tip");
    tip.hidden = false;
    tip.innerHTML = html;
    const { offsetWidth: width, offsetHeight: height } = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  }

  hush() {
    this.root.querySelector(".tip").hidden = true;
  }

  say(words) {
    this.root.querySelector(".said").textContent = words;
  }

  // ---- what a reader does ------------------------------------------------------------------------------------------

  press({ do: action, toggle }) {
    if (toggle) this.toggle(toggle);
    if (action) this.actions[action]();
  }

  key(event) {
    if (event.target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.panels.forEach((panel) => panel.walk(-1)),
      ArrowRight: () => this.panels.forEach((panel) => panel.walk(1)),
      "+": this.actions.in,
      "=": this.actions.in,
      "-": this.actions.out,
      0: this.actions.fit,
      " ": this.actions.play,
    };
    const action = actions[event.key] ?? (KEYS[event.key] && (() => this.toggle(KEYS[event.key])));
    if (!action) return;
    event.preventDefault();
    action();
  }

  toggle(option) {
    this.options[option] = !this.options[option];
    this.shown();
  }

  zoom(factor) {
    if (factor === Infinity) this.sight.fit();
    else this.sight.zoom(factor);
    this.moved();
  }

  /** Let time run over what is in sight; again: stop. */
  play() {
    const began = performance.now();
    const playing = (this.playing = this.playing ? null : began);
    const frame = (now) => {
      const share = (now - began) / PLAY_MS;
      if (this.playing !== playing || playing === null || share >= 1) {
        if (this.playing === playing) [this.playing, this.moment] = [null, null];
        return this.moved();
      }
      this.moment = this.sight.from + Math.max(0, share) * (this.sight.to - this.sight.from);
      this.moved();
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  save(how) {
    if (this.first) how(this.fileName(), this.first.layout(), this.theme, this.options);
  }

  fileName() {
    const { run, step } = this.first;
    return `${run.replace(/[^\w.-]+/g, "-").replace(/^[-.]+/, "") || "run"}-step${step.step}`;
  }
}

export async function render() {
  const style = document.createElement("link");
  Object.assign(style, { rel: "stylesheet", href: "page.css" });
  const ready = new Promise((done) => style.addEventListener("load", done));
  document.head.append(style);
  await ready;
  const page = new Page(document.body);
  globalThis.pipeline = page;
  await page.start();
}
