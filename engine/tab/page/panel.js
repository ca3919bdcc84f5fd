/** One run on the page: which step of it is shown, its timeline, what is pointed at, its waterfall and its ranks. */

import { fetchStep } from "./api.js";
import { explainAction, explainBubble } from "./explain.js";
import { watch } from "./gestures.js";
import { Step } from "./model.js";
import { CanvasPainter } from "./painter.js";
import { rankTable } from "./ranks.js";
import { stepStrip } from "./strip.js";
import { drawTimeline, LABELS, Layout } from "./timeline.js";
import { waterfall } from "./waterfall.js";
import { count, ms, share } from "./words.js";

const FRAME = `
  <header>
    <label>run <select class="run"></select></label>
    <span class="stepping">
      <button class="previous" title="previous step (←)">◀</button>
      <span class="which"></span>
      <button class="next" title="next step (→)">▶</button>
    </span>
    <span class="facts"></span>
  </header>
  <div class="strip"></div>
  <div class="drawing"><canvas tabindex="0" aria-label="timeline of a step"></canvas></div>
  <div class="card" aria-live="polite" hidden></div>
  <div class="below"><div class="fall"></div><div class="table"></div></div>`;

export class Panel {
  /** `page`: { sight, options, theme, moment, runs, moved(), shown(), tip(html, event), hush() } */
  constructor(page, root) {
    this.page = page;
    this.root = root;
    root.innerHTML = FRAME;
    this.part = (selector) => root.querySelector(selector);
    this.canvas = this.part("canvas");
    this.run = null;
    this.index = -1;
    this.step = null;
    this.hovered = null;
    this.selected = null;
    this.listen();
  }

  listen() {
    this.part(".run").addEventListener("change", (event) => this.choose(event.target.value));
    this.part(".previous").addEventListener("click", () => this.walk(-1));
    this.part(".next").addEventListener("click", () => this.walk(1));
    this.part(".strip").addEventListener("click", (event) => {
      const bar = event.target.closest("[data-index]");
      if (bar) this.show(Number(bar.dataset.index));
    });
    watch(this.canvas, this.page.sight, {
      layout: () => this.layout(),
      moved: () => this.page.moved(),
      hover: (x, y, event) => this.hover(x, y, event),
      leave: () => this.point(null),
      click: (x, y) => this.click(x, y),
    });
  }

  get steps() {
    return this.page.runs.find(({ name }) => name === this.run)?.steps ?? [];
  }

  /** Runs came or grew. Whoever looks at the last step goes on looking at the last. */
  async renew(before) {
    const [select, names] = [this.part(".run"), this.page.runs.map(({ name }) => name)];
    if (names.join("\n") !== [...select.options].map(({ value }) => value).join("\n")) {
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === this.run)));
    }
    if (!this.run) return;
    const known = before.find(({ name }) => name === this.run)?.steps ?? [];
    if (this.steps.length === known.length) return;
    if (this.steps.length && this.index === known.length - 1) await this.show(this.steps.length - 1);
    else this.drawHead();
  }

  async choose(run) {
    this.run = run;
    this.part(".run").value = run;
    await this.show(this.steps.length - 1);
  }

  walk(by) {
    const index = Math.max(0, Math.min(this.steps.length - 1, this.index + by));
    if (index !== this.index) return this.show(index);
  }

  async show(index) {
    this.index = index;
    const [run, { step }] = [this.run, this.steps[index]];
    this.drawHead();
    try {
      const told = await fetchStep(run, step);
      const made = new Step(told);
      if (this.run !== run || this.steps[this.index]?.step !== step) return; // meanwhile another one was asked for
      this.step = made;
      this.page.learn(told);
    } catch (error) {
      return this.page.say(`Step ${step} of ${run} cannot be shown: ${error.message}`);
    }
    this.page.say("");
    this.page.hush();
    this.hovered = null;
    this.pin(null);
    this.page.shown();
  }

  drawHead() {
    const { page, steps, index } = this;
    const now = steps[index];
    this.part(".which").textContent = now ? `step ${now.step} (${index + 1} of ${steps.length})` : "no traced step";
    this.part(".strip").innerHTML =
      steps.length > 1 ? stepStrip(steps, index, page.theme, this.root.clientWidth - 24) : "";
  }

  /** Everything that stands still while the timeline moves. */
  drawRest() {
    const { step, page } = this;
    this.drawHead();
    if (!step) return;
    const facts = [step.schedule, count(step.ranks, "rank"), count(step.microbatches, "micro-batch", "es")];
    if (step.replicas > 1) facts.push(`${step.replicas} replicas`);
    facts.push(`step ${ms(step.time)}`, `bubble ${share(step.bubble, 1)}`);
    const doubt = Math.max(...step.uncertainty);
    if (doubt > 0) facts.push(`clocks within ${ms(doubt)}`);
    this.part(".facts").textContent = facts.join(" · ");
    const wide = Math.min(560, Math.max(400, this.root.clientWidth * 0.36));
    this.part(".fall").innerHTML = step.waterfall.length
      ? waterfall(step, page.theme, page.palette.bars, wide, page.against(this))
      : `<p class="none">${step.noWaterfall}</p>`;
    this.part(".table").innerHTML = rankTable(step, page.theme);
  }

  layout() {
    return new Layout(this.step, this.part(".drawing").clientWidth, this.page.sight, this.page.options);
  }

  draw() {
    if (!this.step) return;
    const layout = this.layout();
    this.canvas.style.height = `${layout.height}px`;
    const { hovered, selected } = this;
    const marks = { hovered, selected, moment: this.page.moment };
    const painter = new CanvasPainter(this.canvas, layout.width, layout.height, window.devicePixelRatio || 1);
    drawTimeline(painter, layout, this.page.theme, this.page.options, marks);
  }

  /** What is at a place of the canvas: { span }, { bubble }, or null. */
  under(x, y) {
    if (!this.step) return null;
    const layout = this.layout();
    const row = layout.rowAt(y);
    if (row < 0 || x < LABELS) return null;
    const moment = layout.moment(x);
    const span = this.step.actionAt(row, moment, layout.halfAt(y));
    if (span >= 0) return { span };
    const bubble = this.step.bubbleAt(row, moment);
    return bubble && { bubble };
  }

  hover(x, y, event) {
    const found = this.under(x, y);
    this.point(found?.span ?? null);
    this.canvas.style.cursor = found ? "pointer" : "grab";
    if (found?.span !== undefined) this.page.tip(explainAction(this.step, found.span, this.page.palette.words), event);
    else if (found) this.page.tip(`bubble, ${ms(found.bubble.to - found.bubble.from)}: click for its cause`, event);
    else this.page.hush();
  }

  point(span) {
    if (span === null) this.page.hush();
    if (span === this.hovered) return;
    this.hovered = span;
    this.page.moved();
  }

  click(x, y) {
    const found = this.under(x, y);
    if (found?.bubble) this.pin(explainBubble(this.step, found.bubble, this.page.palette.categories), found.bubble);
    else this.pin(found && `<p>${explainAction(this.step, found.span, this.page.palette.words)}</p>`);
    this.page.moved();
  }

  pin(html, selected = null) {
    this.selected = selected;
    const card = this.part(".card");
    card.hidden = !html;
    card.innerHTML = html || "";
  }

  /** Where on the screen the middle of an action is, or of the bubble after it: for the console, and for tests. */
  where(label, after = false) {
    const { spans } = this.step;
    const span = spans.start.findIndex((_, i) => this.step.label(i) === label);
    const [layout, box] = [this.layout(), this.canvas.getBoundingClientRect()];
    const { y, height } = layout.block(spans.rank[span], this.step.half.get(span));
    const moment = after ? spans.end[span] + 1000 : (spans.start[span] + spans.end[span]) / 2;
    return { x: box.left + layout.x(moment), y: box.top + y + height / 2 };
  }
}
