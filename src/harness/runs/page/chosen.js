// Pictures of the runs that are shown, and two runs beside each other; then the page is started.
const AT_ONCE = 6; // pictures; more are asked for
let numPictures = AT_ONCE;

function picture(run, name) {
  const image = make("img", { src: `data:image/png;base64,${run.pictures[name]}`, alt: `${name} of ${run.name}` });
  return make("figure", {}, make("figcaption", {}, run.name), image);
}

function drawPictures() {
  const name = byId("picture").value;
  const runs = shownRuns().filter((run) => name in run.pictures);
  byId("gallery").replaceChildren(...runs.slice(0, numPictures).map((run) => picture(run, name)));
  byId("more").hidden = runs.length <= numPictures;
  byId("more").textContent = `${runs.length - numPictures} more`;
  byId("pictures-hint").textContent = DATA.has_all_pictures ? "" : "The page has the pictures of the best runs, up to 16 MB.";
}

function drawDifference() {
  const [one, two] = [RUNS[byId("one").value], RUNS[byId("two").value]];
  const settings = new Set([...Object.keys(one.settings), ...Object.keys(two.settings)]);
  const metrics = new Set([...Object.keys(one.metrics), ...Object.keys(two.metrics)]);
  const rows = [];
  for (const [kind, keys] of [["setting", settings], ["result", [...metrics, ...Object.keys(one.facts)]]])
    for (const key of keys) {
      const [a, b] = [valueOf(one, key), valueOf(two, key)];
      if (JSON.stringify(a) === JSON.stringify(b)) continue;
      const cells = [a, b].map((value) => make("td", { textContent: written(key, value) }));
      rows.push(make("tr", { className: kind }, make("td", { textContent: key }), ...cells));
    }
  const heads = ["", one.name, two.name].map((text) => make("th", { textContent: text }));
  byId("difference").tHead.replaceChildren(make("tr", {}, ...heads));
  const same = make("tr", {}, make("td", { colSpan: 3, textContent: "Their settings and what they have reached are the same." }));
  byId("difference").tBodies[0].replaceChildren(...(rows.length ? rows : [same]));
  const names = Object.keys(one.pictures).filter((name) => name in two.pictures);
  byId("pair").replaceChildren(...names.flatMap((name) => [picture(one, name), picture(two, name)]));
}

// All that depends on which runs are shown: the table at once and for several changes together,
// figures when they are in sight.
const FIGURES = {
  "curves": drawCurves,
  "settings": () => {
    drawScatter();
    drawParallel();
  },
  "pictures": drawPictures,
};
const [stale, inSight] = [new Set(), new Set()];
let isWaiting = false;

function refresh(figures = Object.keys(FIGURES)) {
  figures.forEach((id) => stale.add(id));
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    drawTable();
    drawStale();
  });
}

function drawStale() {
  const id = [...stale].find((id) => inSight.has(id));
  if (id === undefined) return;
  stale.delete(id);
  FIGURES[id]();
  requestAnimationFrame(drawStale); // the next one when this one is on the screen
}

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inSight.add(target.id) : inSight.delete(target.id);
  drawStale();
}, { rootMargin: "400px" });

const THEMES = { "": "theme: auto", light: "theme: light", dark: "theme: dark" };
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = THEMES[name];
  try {
    localStorage.setItem("theme", name);
  } catch {} // some browsers keep nothing for a file
}

function start() {
  let theme = "";
  try {
    theme = localStorage.getItem("theme") ?? "";
  } catch {}
  setTheme(theme in THEMES ? theme : "");
  drawSummary();

  const curves = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].sort();
  const first = [OBJECTIVES[0], "val/loss", "train/loss"].find((name) => curves.includes(name)) ?? curves[0];
  fill(byId("metric"), curves.map((name) => [name, name]), first);
  const settings = DATA.settings.map(({ key, short }) => [key, short]);
  fill(byId("colour"), [["", "one for each run"], ...settings], "");
  const reached = ["best", ...TESTED, ...metricNames().filter((name) => !TESTED.includes(name)).sort()];
  const known = reached.filter((name) => RUNS.some((run) => isNumber(valueOf(run, name))));
  fill(byId("reached"), known.map((name) => [name, titleOf(name)]), known[0]);
  const numeric = DATA.settings.filter(({ key }) => !key.endsWith("seed") && RUNS.every((run) => isNumber(valueOf(run, key)) || run.facts.status === "damaged"));
  fill(byId("setting"), settings, (numeric[0] ?? DATA.settings[0])?.key);
  byId("settings").hidden = !settings.length || !known.length;
  const pictures = [...new Set(RUNS.flatMap((run) => Object.keys(run.pictures)))].sort();
  fill(byId("picture"), pictures.map((name) => [name, name]), pictures[0]);
  byId("pictures").hidden = !pictures.length;
  const names = RUNS.map((run, i) => [i, run.name]);
  fill(byId("one"), names, 0);
  fill(byId("two"), names, Math.min(1, RUNS.length - 1));
  byId("differences").hidden = RUNS.length < 2;

  const suggestLog = () => {
    byId("log-setting").checked = spansDecades(RUNS.map((run) => valueOf(run, byId("setting").value)).filter((v) => v !== undefined));
  };
  suggestLog();
  const on = (event, ids, action) => ids.forEach((id) => byId(id).addEventListener(event, action));
  on("input", ["filter"], () => {
    STATE.words = byId("filter").value;
    refresh();
  });
  on("change", ["all-columns", "colour"], () => refresh());
  on("change", ["metric", "log-value", "log-step"], () => {
    inView = [-Infinity, Infinity];
    drawCurves();
  });
  on("input", ["smooth"], drawCurves);
  on("change", ["setting"], suggestLog);
  on("change", ["setting", "log-setting", "log-reached"], drawScatter);
  on("change", ["reached"], () => refresh(["settings"]));
  on("change", ["picture"], drawPictures);
  on("click", ["more"], () => {
    numPictures += AT_ONCE;
    drawPictures();
  });
  on("change", ["one", "two"], drawDifference);
  on("click", ["theme"], () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
    refresh();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => refresh());

  drawTable();
  drawCurves();
  byId("curves").on("plotly_relayout", () => {
    const { range, autorange, type } = byId("curves").layout.xaxis;
    inView = autorange ? [-Infinity, Infinity] : range.map((end) => (type === "log" ? 10 ** end : end));
    drawCurves();
  });
  // A click on the legend is one on the table's box; a double click leaves that run alone.
  byId("curves").on("plotly_legendclick", (event) => {
    toggle(byId("curves").runs[event.curveNumber]);
    return false;
  });
  byId("curves").on("plotly_legenddoubleclick", (event) => {
    const kept = byId("curves").runs[event.curveNumber];
    for (const run of LISTED) run === kept ? STATE.hidden.delete(run) : STATE.hidden.add(run);
    refresh();
    return false;
  });
  if (RUNS.length > 1) drawDifference();
  Object.keys(FIGURES).forEach((id) => observer.observe(byId(id)));
  refresh();
}
start();
