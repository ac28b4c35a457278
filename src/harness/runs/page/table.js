// The table of runs: sorted by any column, filtered, with a box that shows or hides a run.
function columns() {
  const settings = DATA.settings.map((setting) => setting.key);
  const left = byId("all-columns").checked ? [] : settings.slice(MOST_SETTINGS);
  const known = (key) => RUNS.some((run) => written(key, valueOf(run, key)) !== "");
  return COLUMNS.filter((key) => !left.includes(key) && (known(key) || key === "run"));
}

// Numbers before words before nothing.
function rank(value) {
  if (isNumber(value)) return [0, value];
  return value === undefined || value === null || value === "" ? [2, 0] : [1, String(value)];
}

function inOrder(runs) {
  if (STATE.key === null) return [...runs];
  const sign = STATE.isDown ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [kindA, one] = rank(valueOf(a, STATE.key));
    const [kindB, two] = rank(valueOf(b, STATE.key));
    if (kindA !== kindB) return kindA - kindB;
    return kindA === 1 ? sign * one.localeCompare(two, "en", { numeric: true }) : sign * (one - two);
  });
}

function drawTable() {
  LISTED = inOrder(RUNS.filter((run) => passes(run, STATE.words)));
  const keys = columns();
  const numeric = new Set(keys.filter((key) => RUNS.some((run) => isNumber(valueOf(run, key)))));
  const all = make("input", { type: "checkbox", title: "show or hide all", checked: shownRuns().length > 0 });
  all.addEventListener("change", () => {
    for (const run of LISTED) all.checked ? STATE.hidden.delete(run) : STATE.hidden.add(run);
    refresh();
  });
  const heads = keys.map((key) => {
    const setting = DATA.settings.find((setting) => setting.key === key);
    const button = make("button", { type: "button", title: [key, ...(setting?.also ?? [])].join(", ") }, shortOf(key));
    const cell = make("th", { className: numeric.has(key) ? "number" : "" }, button);
    if (STATE.key === key) {
      cell.setAttribute("aria-sort", STATE.isDown ? "descending" : "ascending");
      button.append(make("span", {}, STATE.isDown ? "▼" : "▲"));
    }
    cell.dataset.key = key;
    button.addEventListener("click", () => {
      STATE.isDown = STATE.key === key ? !STATE.isDown : false;
      STATE.key = key;
      refresh(["pictures"]); // figures have no order
    });
    return cell;
  });
  byId("runs").tHead.replaceChildren(make("tr", {}, make("th", {}, all), ...heads));
  byId("runs").tBodies[0].replaceChildren(...LISTED.map((run) => row(run, keys, numeric)));
  byId("count").textContent = LISTED.length === RUNS.length ? "" : `${LISTED.length} of ${RUNS.length} runs`;
}

function row(run, keys, numeric) {
  const isHidden = STATE.hidden.has(run);
  const box = make("input", { type: "checkbox", checked: !isHidden, title: `show ${run.name}` });
  box.addEventListener("change", () => toggle(run));
  const cells = keys.map((key) => {
    const text = written(key, valueOf(run, key));
    const cell = make("td", { textContent: text, className: numeric.has(key) ? "number" : "cut" });
    if (text.length > 20) cell.title = text;
    if (key === "run") {
      const chip = make("span", { className: "chip" });
      chip.style.background = isHidden ? "transparent" : chipColour(run);
      cell.prepend(chip);
      cell.title = run.folder;
    }
    if (key === "status") {
      cell.className = text;
      cell.title = run.facts.reason;
    }
    return cell;
  });
  return make("tr", { className: isHidden ? "off" : "" }, make("td", {}, box), ...cells);
}

function toggle(run) {
  STATE.hidden.has(run) ? STATE.hidden.delete(run) : STATE.hidden.add(run);
  refresh();
}

function drawSummary() {
  const counts = {};
  for (const run of RUNS) counts[run.facts.status] = (counts[run.facts.status] ?? 0) + 1;
  byId("summary").textContent = Object.entries(counts).map(([status, count]) => `${count} ${status}`).join(", ");
  const bad = RUNS.filter((run) => run.facts.status !== "finished");
  byId("troubles").hidden = !bad.length;
  byId("troubles").querySelector("summary").textContent =
    `${bad.length} ${bad.length === 1 ? "has" : "have"} not finished`;
  byId("troubles").querySelector("ul").replaceChildren(
    ...bad.map((run) => make("li", {}, `${run.name}: `,
      make("span", { className: run.facts.status }, run.facts.status), run.facts.reason ? `, ${run.facts.reason}` : "")));
  const made = new Date(DATA.made * 1000).toLocaleString();
  byId("made").textContent = `Made ${made} by scripts/runs.py report. This page holds all that it shows.`;
}
