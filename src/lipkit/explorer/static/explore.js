"use strict";
// The page of the explorer: the slider moves the cursor at once and asks for an attack once it rests.
const PER_PAGE = 24;
const VERDICTS = {
  certified: "certified: no change within this radius alters the prediction",
  unknown: "not certified, and no adversarial example found at this radius",
  broken: "an adversarial example exists within this radius",
  wrong: "misclassified already",
};
const STANDINGS = { certified: "certified", unknown: "not certified", wrong: "misclassified" };
const state = { runs: [], largest: 1, index: 0, start: 0, asked: 0, samples: [] };
const element = (id) => document.getElementById(id);
const part = (run, name) => element(`run-${run}`).querySelector(`.${name}`);
const steps = () => Math.round(state.largest * 255);
const radius = () => Number(element("radius").value) / 255;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

async function ask(address) {
  const response = await fetch(address);
  const content = await response.json();
  if (!response.ok) throw new Error(content.detail || response.statusText);
  return content;
}

function say(problem) {
  element("problem").textContent = problem ? String(problem.message || problem) : "";
}

function draw(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  element("curve").append(node);
  return node;
}

// The curve is drawn in pixels of the page, so that its text is as large as other text, and again at each new width.
const [LEFT, TOP, BOTTOM] = [52, 15, 205];
const across = (eps) => LEFT + ((element("curve").clientWidth - LEFT - 14) * eps) / state.largest;
const up = (share) => BOTTOM - (BOTTOM - TOP) * share;

function drawCurve() {
  const [start, end] = [across(0), across(state.largest)];
  element("curve").replaceChildren();
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    draw("line", { class: "axis", x1: start, x2: end, y1: up(share), y2: up(share) });
    draw("text", { x: start - 6, y: up(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
  }
  const intervals = end - start < 320 ? 2 : 4;
  for (let i = 0; i <= intervals; i += 1) {
    const eps = (state.largest * i) / intervals;
    const anchor = i === intervals ? "end" : "middle";
    draw("text", { x: across(eps), y: 226, "text-anchor": anchor }, `${Math.round(255 * eps)}/255`);
  }
  state.runs.forEach((run, number) => {
    const points = run.curve.eps.map((eps, i) => `${across(eps)},${up(run.curve.certified[i])}`);
    draw("polyline", { class: `line${number}`, points: points.join(" ") });
  });
  draw("line", { class: "cursor", id: "cursor", y1: TOP, y2: BOTTOM });
  moveCursor();
}

function moveCursor() {
  const eps = radius();
  element("radius-text").textContent = `${element("radius").value}/255`;
  element("cursor").setAttribute("x1", across(eps));
  element("cursor").setAttribute("x2", across(eps));
  state.runs.forEach((run, number) => {
    const after = run.curve.eps.findIndex((value) => value > eps);
    const share = run.curve.certified[after <= 0 ? run.curve.eps.length - 1 : after - 1];
    element("legend").children[number].querySelector("output").textContent = `${percent(share)} certified`;
  });
  paintSamples();
}

function standing(sample) {
  if (!sample.correct) return "wrong";
  return sample.radius === null || sample.radius > radius() ? "certified" : "unknown";
}

function paintSamples() {
  for (const button of element("samples").children) {
    const sample = state.samples.find((s) => s.index === Number(button.dataset.index));
    button.className = standing(sample);
    button.setAttribute("aria-label", `sample ${sample.index}, ${STANDINGS[button.className]}`);
    button.setAttribute("aria-current", String(sample.index === state.index));
  }
}

async function showPage() {
  state.samples = await ask(`/api/runs/0/page?start=${state.start}&count=${PER_PAGE}`);
  element("samples").replaceChildren(
    ...state.samples.map((sample) => {
      const button = document.createElement("button");
      const image = document.createElement("img");
      button.type = "button";
      button.dataset.index = sample.index;
      image.src = sample.image;
      image.alt = "";
      button.append(image);
      button.addEventListener("click", () => choose(sample.index));
      return button;
    }),
  );
  paintSamples();
}

function setPicture(run, name, source) {
  if (source) part(run, name).src = source;
  else part(run, name).removeAttribute("src");
}

async function showSample() {
  const shown = state.index;
  for (let run = 0; run < state.runs.length; run += 1) {
    const sample = await ask(`/api/runs/${run}/samples/${shown}`);
    if (shown !== state.index) return;
    setPicture(run, "clean", sample.image);
    part(run, "truth").textContent = sample.label;
    part(run, "prediction").textContent = sample.prediction;
    part(run, "margin").textContent = sample.margin.toFixed(4);
    // rounded down: what is shown is proved
    const shownRadius = Math.floor(1e4 * sample.radius) / 1e4;
    part(run, "certified-radius").textContent = sample.radius === null ? sample.radius_text : shownRadius.toFixed(4);
  }
}

async function showAttack() {
  state.asked += 1;
  const turn = state.asked;
  const [shown, eps] = [state.index, radius()];
  for (let run = 0; run < state.runs.length; run += 1) {
    const found = await ask(`/api/runs/${run}/samples/${shown}/attack?eps=${eps}`);
    if (turn !== state.asked) return;
    part(run, "verdict").textContent = VERDICTS[found.verdict];
    part(run, "verdict").className = `verdict ${found.verdict}`;
    setPicture(run, "adversarial", found.image);
    setPicture(run, "difference", found.difference);
    part(run, "fooled").textContent = found.found ? `seen as ${found.prediction}` : "none found";
    part(run, "norm").textContent = found.found ? found.norm.toFixed(4) : "–";
    part(run, "scale").textContent = found.found ? `largest change ${(255 * found.largest_change).toFixed(1)}/255` : "";
  }
  element("radius").dataset.shown = String(Math.round(255 * eps));
}

async function choose(index) {
  const last = state.runs[0].samples - 1;
  state.index = Math.min(Math.max(0, Math.trunc(index) || 0), last);
  element("index").value = state.index;
  paintSamples();
  try {
    say("");
    await showSample();
    await showAttack();
  } catch (problem) {
    say(problem);
  }
}

async function turn(by) {
  const last = state.runs[0].samples - 1;
  state.start = Math.min(Math.max(0, state.start + by), Math.max(0, last - (last % PER_PAGE)));
  await showPage().catch(say);
}

let resting;
function slide() {
  moveCursor();
  clearTimeout(resting);
  resting = setTimeout(() => showAttack().catch(say), 150);
}

async function begin() {
  const content = await ask("/api/runs");
  state.runs = content.runs;
  state.largest = content.largest;
  element("radius").max = steps(); // the slider's 36 becomes its end where that is less
  element("radius").addEventListener("input", slide);
  element("index").addEventListener("change", (event) => choose(Number(event.target.value)));
  element("earlier").addEventListener("click", () => turn(-PER_PAGE));
  element("later").addEventListener("click", () => turn(PER_PAGE));
  await showPage();
  new ResizeObserver(drawCurve).observe(element("curve"));
  drawCurve();
  await choose(Math.max(0, state.samples.findIndex((sample) => sample.correct)));
}

begin().catch(say);
