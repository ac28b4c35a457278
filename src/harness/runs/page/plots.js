// Learning curves, a metric against a setting, and all settings in parallel.
const RENDERER = (() => {
  try {
    const context = document.createElement("canvas").getContext("webgl");
    const about = context.getExtension("WEBGL_debug_renderer_info");
    return String(context.getParameter(about ? about.UNMASKED_RENDERER_WEBGL : context.RENDERER));
  } catch {
    return "";
  }
})();
const HAS_WEBGL = RENDERER !== "";
// Without a graphics card WebGL is slower than SVG.
const HAS_FAST_WEBGL = HAS_WEBGL && !/swiftshader|llvmpipe|software|basic render/i.test(RENDERER);
const MOST_SVG_POINTS = 20000; // beyond, a graphics card draws if there is one
const MOST_POINTS = HAS_FAST_WEBGL ? 200000 : 40000; // of all curves; a part of the steps shows more
const MOST_IN_LEGEND = 25; // beyond, the table is the legend
const IS_TOUCHED = matchMedia("(pointer: coarse)").matches; // where a drag is to scroll the page
// By name, because plotly's own choice has a button that sends the chart away.
const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];
const SETTINGS = { responsive: true, displaylogo: false, modeBarButtons: BUTTONS };
if (IS_TOUCHED) SETTINGS.displayModeBar = false;

const isNarrow = () => innerWidth < 640;

function layout(changes) {
  const axis = { gridcolor: colourOf("--line"), zerolinecolor: colourOf("--line"), linecolor: colourOf("--line"), automargin: true };
  return {
    margin: { l: 55, r: 12, t: 34, b: 45 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colourOf("--faint"), activecolor: colourOf("--accent") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colourOf("--text"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    hoverlabel: { bgcolor: colourOf("--card"), bordercolor: colourOf("--line"), font: { color: colourOf("--text") }, namelength: -1 },
    hovermode: "closest",
    dragmode: IS_TOUCHED ? false : "zoom",
    ...changes,
    xaxis: { ...axis, ...changes.xaxis },
    yaxis: { ...axis, ...changes.yaxis },
  };
}

// Runs' colours: their own, or by the value of a setting, from the smallest to the largest.
const SCALE = [[0x44, 0x39, 0xa0], [0x2b, 0x86, 0xb5], [0x2f, 0xb4, 0x7c], [0xc9, 0xa9, 0x00], [0xe0, 0x5a, 0x1c]];
function chipColour(run) {
  const key = byId("colour").value;
  if (!key) return run.colour;
  const values = [...new Set(RUNS.map((run) => valueOf(run, key)))].sort((a, b) =>
    isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const place = values.length > 1 ? (values.indexOf(valueOf(run, key)) / (values.length - 1)) * (SCALE.length - 1) : 0;
  const low = Math.min(Math.floor(place), SCALE.length - 2);
  const part = place - low;
  return `rgb(${SCALE[low].map((from, i) => Math.round(from + part * (SCALE[low + 1][i] - from))).join(",")})`;
}

// A running mean that forgets; its start is corrected, as in Adam.
function smoothed(values, weight) {
  if (!weight) return values;
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// The smallest and the largest value of each stretch of a curve, of the steps that are in sight.
function thinned([steps, values], most, [from, to]) {
  const first = Math.max(0, steps.findIndex((step) => step >= from) - 1);
  const after = steps.findIndex((step) => step > to);
  const end = after < 0 ? steps.length : after + 1;
  const size = Math.ceil((2 * (end - first)) / most);
  if (size <= 2) return [steps.slice(first, end), values.slice(first, end)];
  const kept = [];
  for (let start = first; start < end; start += size) {
    let [low, high] = [start, start];
    for (let i = start; i < Math.min(start + size, end); i++) {
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
    }
    kept.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return [kept.map((i) => steps[i]), kept.map((i) => values[i])];
}

let inView = [-Infinity, Infinity]; // steps
function drawCurves() {
  const metric = byId("metric").value;
  const weight = Number(byId("smooth").value);
  const runs = shownRuns().filter((run) => metric in run.curves);
  const most = Math.max(100, MOST_POINTS / runs.length);
  const curves = runs.map(({ curves: { [metric]: [steps, values] } }) => thinned([steps, smoothed(values, weight)], most, inView));
  const total = curves.reduce((sum, [steps]) => sum + steps.length, 0);
  const type = HAS_FAST_WEBGL && total > MOST_SVG_POINTS ? "scattergl" : "scatter";
  const traces = runs.map((run, i) => ({
    type,
    mode: run.curves[metric][0].length < 30 ? "lines+markers" : "lines",
    name: label(run.name),
    x: curves[i][0],
    y: curves[i][1],
    line: { color: chipColour(run), width: 1.6 },
    marker: { size: 4 },
    hovertemplate: `<b>${label(run.name)}</b><br>step %{x}<br>${label(metric)} %{y:.5g}<extra></extra>`,
  }));
  const hasLegend = runs.length > 1 && runs.length <= (isNarrow() ? 6 : MOST_IN_LEGEND);
  Plotly.react("curves", traces, layout({
    uirevision: metric + byId("log-value").checked + byId("log-step").checked,
    showlegend: hasLegend,
    legend: isNarrow() ? { orientation: "h", y: -0.25 } : {},
    xaxis: { title: { text: "step" }, type: byId("log-step").checked ? "log" : "linear" },
    yaxis: { title: { text: label(metric) }, type: byId("log-value").checked ? "log" : "linear" },
    annotations: runs.length ? [] : [{ text: "No run that is shown has this metric.", showarrow: false }],
  }), SETTINGS);
  byId("curves").runs = runs;
  byId("smooth-shown").value = weight ? weight.toFixed(2) : "off";
  const hints = [`Of each curve at most ${DATA.most_points} points are kept, among them the smallest and the largest value of every stretch; smoothing works on these.`];
  if (runs.some((run, i) => curves[i][0].length < run.curves[metric][0].length) && inView[0] === -Infinity)
    hints.push("Of so many curves fewer are drawn; zooming in shows the others.");
  if (runs.length > 1 && !hasLegend) hints.push("The table's colours are the legend.");
  byId("thinned").textContent = hints.join(" ");
}

// Whether values are positive numbers, the largest ten times the smallest or more.
function spansDecades(values) {
  return values.every((value) => isNumber(value) && value > 0) && Math.max(...values) >= 10 * Math.min(...values);
}

function drawScatter() {
  const [metric, key] = [byId("reached").value, byId("setting").value];
  const runs = shownRuns().filter((run) => isNumber(valueOf(run, metric)));
  const values = runs.map((run) => valueOf(run, key));
  const isNumeric = values.every(isNumber);
  const points = {
    type: "scatter",
    mode: "markers",
    x: isNumeric ? values : values.map((value) => label(value === undefined ? "none" : written("", value))),
    y: runs.map((run) => valueOf(run, metric)),
    text: runs.map((run) => label(run.name)),
    marker: { size: 9, opacity: 0.85, color: runs.map(chipColour), line: { width: 1, color: colourOf("--card") } },
    hovertemplate: `<b>%{text}</b><br>${label(shortOf(key))} %{x}<br>${label(titleOf(metric))} %{y:.5g}<extra></extra>`,
  };
  const isLog = isNumeric && byId("log-setting").checked;
  const different = [...new Set(values)];
  const ticks = isNumeric && different.length <= 8 ? { tickvals: different, ticktext: different.map((value) => written("", value)) } : {};
  Plotly.react("scatter", [points], layout({
    xaxis: { title: { text: label(key) }, type: isNumeric ? (isLog ? "log" : "linear") : "category", ...ticks },
    yaxis: { title: { text: label(titleOf(metric)) }, type: byId("log-reached").checked ? "log" : "linear" },
  }), SETTINGS);
}

// One upright axis: numbers as they are or as powers of ten, words by their places.
function dimension(name, values) {
  if (!values.every(isNumber)) {
    const words = [...new Set(values.map((value) => (value === undefined ? "none" : written("", value))))];
    words.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    return {
      label: label(name), tickvals: words.map((_, i) => i), ticktext: words.map(label),
      values: values.map((value) => words.indexOf(value === undefined ? "none" : written("", value))),
    };
  }
  const different = [...new Set(values)].sort((a, b) => a - b);
  const isLog = spansDecades(values);
  const placed = isLog ? Math.log10 : (value) => value;
  const made = { label: label(name), values: values.map(placed) };
  if (different.length > 10 && !isLog) return made;
  let ticks = different;
  if (different.length > 10) {
    const [low, high] = [Math.floor(Math.log10(different[0])), Math.ceil(Math.log10(different.at(-1)))];
    ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  }
  return { ...made, tickvals: ticks.map(placed), ticktext: ticks.map((tick) => written("", tick)) };
}

function drawParallel() {
  const metric = byId("reached").value;
  const runs = shownRuns().filter((run) => isNumber(valueOf(run, metric)));
  const settings = DATA.settings.filter(({ key }) => new Set(runs.map((run) => JSON.stringify(valueOf(run, key)))).size > 1);
  const numeric = settings.filter(({ key }) => runs.every((run) => isNumber(valueOf(run, key))));
  const isDrawn = HAS_WEBGL && numeric.length >= 2 && runs.length > 1;
  byId("parallel-box").hidden = !isDrawn;
  byId("parallel-hint").textContent = isDrawn
    ? "Each line is a run; drag along an axis to pick a range, and drag an axis's name to move it."
    : numeric.length >= 2 && !HAS_WEBGL ? "Parallel coordinates need WebGL, which this browser has not." : "";
  if (!isDrawn) return;
  const axes = [...numeric, ...settings.filter((setting) => !numeric.includes(setting))].slice(0, MOST_SETTINGS);
  // Of lines that lie on each other the last is seen: the best.
  runs.sort((a, b) => (DATA.is_max ? 1 : -1) * (valueOf(a, metric) - valueOf(b, metric)));
  const reached = runs.map((run) => valueOf(run, metric));
  const trace = {
    type: "parcoords",
    line: { color: reached, colorscale: "Viridis", showscale: true, colorbar: { thickness: 12, outlinewidth: 0 } },
    dimensions: [...axes.map(({ key, short }) => dimension(short, runs.map((run) => valueOf(run, key)))), { label: label(titleOf(metric)), values: reached }],
    rangefont: { color: "rgba(0,0,0,0)" },
  };
  Plotly.react("parallel", [trace], layout({ margin: { l: 60, r: 30, t: 60, b: 20 } }), { ...SETTINGS, displayModeBar: false });
}
