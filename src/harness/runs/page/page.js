// What all parts of the page share: the data, what the reader has chosen, and how values are written.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MOST_SETTINGS = 8; // columns, unless all are asked for
const byId = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number";
const STATE = { key: null, isDown: false, hidden: new Set(), words: "" };

// An element with properties and children. Text goes in as text, never as HTML.
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function fill(select, choices, chosen) {
  select.replaceChildren(...choices.map(([value, text]) => make("option", { value, textContent: text })));
  if (chosen !== undefined) select.value = chosen;
}

// A fact, a metric or a setting of a run, by its name; undefined where it has none.
function valueOf(run, key) {
  if (key === "run") return run.name;
  if (key in run.facts) return run.facts[key];
  return key in run.metrics ? run.metrics[key] : run.settings[key];
}

function duration(seconds) {
  const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  for (const [size, name, small, smaller] of units)
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ${Math.floor((seconds % size) / small)} ${smaller}`;
  return `${Math.round(seconds)} s`;
}

// A value as a person reads it.
function written(key, value) {
  if (value === undefined || value === null) return key in (RUNS[0]?.facts ?? {}) || value === undefined ? "" : "null";
  if (key === "started") return new Date(value * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
  if (key === "seconds") return duration(value);
  if (key === "samples/s") return Math.round(value).toLocaleString("en");
  if (key === "held back by") return value.split(";")[0].replace(" of the time waiting for data", "");
  if (key === "commit") return value.slice(0, 8);
  if (isNumber(value)) return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Plotly takes a few tags out of its labels: none of ours is one.
const label = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
// A colour of the style sheet, as it is in this theme.
function colourOf(name) {
  const probe = document.body.appendChild(make("span"));
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

// Ten colours that differ for all eyes, then hues that are as far apart as they can be.
const TEN = ["#2f6fde", "#e07b00", "#1f9d55", "#d43d51", "#8a5cd6", "#9c6b4e", "#d65db1", "#7a828e", "#a3a500", "#1aa6b7"];
RUNS.forEach((run, i) => {
  run.colour = i < TEN.length ? TEN[i] : `hsl(${Math.round((i * 137.508) % 360)}, 60%, 50%)`;
});

const metricNames = () => [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
const OBJECTIVES = [...new Set(RUNS.map((run) => run.objective).filter(Boolean))];
const titleOf = (metric) => (metric === "best" && OBJECTIVES.length === 1 ? `best ${OBJECTIVES[0]}` : metric);
const shortOf = (key) => DATA.settings.find((setting) => setting.key === key)?.short ?? key;

// Conditions such as lr<0.01, and words that a run's row must hold.
function passes(run, text) {
  return text.split(/\s+/).filter(Boolean).every((word) => {
    const [, name, sign, wanted] = word.match(/^(.+?)(<=|>=|!=|<|>|=)(.+)$/) ?? [];
    if (!sign) return COLUMNS.some((key) => written(key, valueOf(run, key)).toLowerCase().includes(word.toLowerCase()));
    const key = COLUMNS.find((key) => key === name) ?? COLUMNS.find((key) => key.endsWith(name) || shortOf(key) === name);
    const value = valueOf(run, key);
    const isSame = String(value).toLowerCase() === wanted.toLowerCase() || (isNumber(value) && value === Number(wanted));
    if (sign === "=") return isSame;
    if (sign === "!=") return !isSame;
    if (!isNumber(value)) return false;
    return { "<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted }[sign];
  });
}

const TESTED = metricNames().filter((name) => name.startsWith("test/")).sort();
const COLUMNS = [
  "run", "status", "best", ...TESTED, ...DATA.settings.map((setting) => setting.key),
  "seconds", "samples/s", "held back by", "started", "tags", "notes", "commit", "reason",
];
// Runs that pass the filter, in the order of the table, and those of them that are ticked.
let LISTED = [];
const shownRuns = () => LISTED.filter((run) => !STATE.hidden.has(run));
