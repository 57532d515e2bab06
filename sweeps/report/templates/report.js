// Script of the report: copies and sorts tables, copies commands, and draws the interactive figure with Vega-Lite.
// The page is complete without the script or the library, with static figures and unsorted tables.
(() => {
"use strict";
const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};

// --- copying ---
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard outside secure contexts
    const area = element("textarea", {value: text});
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const name = button.dataset.name ??= button.textContent;
  button.textContent = "copied";
  setTimeout(() => { button.textContent = name; }, 1200);
}
const copyButton = (name, title, text) => {
  const button = element("button", {type: "button", className: "copy", title}, name);
  button.addEventListener("click", () => copy(text(), button));
  return button;
};
for (const code of document.querySelectorAll("code.command")) {
  code.after(copyButton("copy", "Copy the command", () => code.textContent));
}

// --- tables ---
const words = cell => (cell.dataset.full ?? cell.querySelector("[title]")?.title ?? cell.innerText).replace(/\s+/g, " ").trim();
// Put an apostrophe before a text that a spreadsheet would read as a formula.
const inert = text => /^[=+@\t\r\n]|^-(?![\d.])/.test(text) ? "'" + text : text;
const formats = {
  CSV: rows => rows.map(row => row.map(text => /[",]/.test(inert(text)) ? `"${inert(text).replaceAll('"', '""')}"` : inert(text)).join(",")).join("\n"),
  LaTeX: (rows, numeric) => {
    const signs = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--"};
    const safe = text => text.replace(/[\\~^–&%$#_{}]/g, sign => signs[sign] ?? "\\" + sign);
    const lines = rows.map(row => row.map(safe).join(" & ") + " \\\\");
    return ["\\begin{tabular}{" + numeric.map(right => right ? "r" : "l").join("") + "}", "\\toprule", lines[0], "\\midrule",
      ...lines.slice(1), "\\bottomrule", "\\end{tabular}"].join("\n");
  },
  Markdown: (rows, numeric) => {
    const lines = rows.map(row => "| " + row.map(text => text.replaceAll("|", "\\|")).join(" | ") + " |");
    return [lines[0], "|" + numeric.map(right => right ? "--:" : "---").join("|") + "|", ...lines.slice(1)].join("\n");
  },
};
const ranked = text => { // sort key: numbers by size, then texts, dashes last
  const plain = text.replace(/^[^\d+−-]*(?=[+−-]?[\d.])/, "");
  const value = parseFloat(plain.replace("−", "-"));
  return /^[–-]?$/.test(text) ? [2, 0, ""] : Number.isNaN(value) ? [1, 0, text] : [0, value, text];
};
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = element("button", {type: "button", className: "sort"}, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numeric = head.classList.contains("n");
      const keys = new Map([...body.rows].map(row => {
        const text = words(row.cells[column]);
        return [row, numeric ? ranked(text) : [text ? 1 : 2, 0, text]];
      }));
      const compare = (a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        if (x[0] !== y[0]) return x[0] - y[0];
        return (x[1] - y[1] || x[2].localeCompare(y[2])) * (down ? -1 : 1);
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
for (const figure of document.querySelectorAll("figure.table")) {
  const table = figure.querySelector("table");
  sortable(table);
  const rows = () => [...table.rows].map(row => [...row.cells].map(words));
  const numeric = [...table.tHead.rows[0].cells].map(cell => cell.classList.contains("n"));
  const buttons = Object.entries(formats).map(([name, write]) =>
    copyButton(name, `Copy the table as ${name}`, () => write(rows(), numeric)));
  figure.append(element("div", {className: "tools"}, "Copy as ", ...buttons));
}

// --- the interactive figure ---
const holder = document.getElementById("study");
if (!holder || !window.DecompressionStream) return;
const study = JSON.parse(holder.textContent);
const shown = study.recipes.map(() => true);
const state = {axis: "c", log: false, bands: false, points: true};
const DASHES = [[1, 0], [6, 2], [2, 2], [6, 2, 2, 2]];
const labels = study.recipes.map(recipe => recipe.label);
const colours = {field: "label", type: "nominal", legend: null, scale: {domain: labels, range: study.recipes.map(r => r.colour)}};
const dashes = {field: "label", type: "nominal", legend: null,
  scale: {domain: labels, range: study.recipes.map(r => DASHES[r.dash])}};
const points = study.points.r.map((recipe, at) => {
  const point = {};
  for (const [name, values] of Object.entries(study.points)) if (values[at] !== null) point[name] = values[at];
  const {label, short} = study.recipes[recipe];
  return {...point, label, short};
});
const visible = rows => rows.filter(row => Number.isFinite(row.x) && (!state.log || row.x > 0));
const axisName = () => study.axes.find(([id]) => id === state.axis)[1];

// Colours of text and lines are in the stylesheet, so that one drawing fits light and dark pages and print.
const look = {background: null, font: "system-ui, sans-serif", view: {stroke: null},
  axis: {labelFontSize: 12, titleFontSize: 13, titleFontWeight: "normal", labelLimit: 240}};
const about = recipe => recipe.named ? `${recipe.a} [${recipe.low}, ${recipe.high}]`
  : `not named (${recipe.verdict}); reward so far ${recipe.a}`;
function curvesChart() {
  const x = {field: "x", type: "quantitative", title: axisName(), scale: {type: state.log ? "log" : "linear", nice: false},
    axis: {grid: false, format: ",.6~g", labelOverlap: true, tickCount: 6}};
  const y = field => ({field, type: "quantitative", title: study.metric, scale: {zero: false}});
  const rows = points.filter(point => shown[point.r]).map(point => ({...point, x: point[state.axis], low: point.y, high: point.y}));
  // The tooltip of a line names only the recipe, because it is the same at all points of the line.
  const fitted = study.recipes.flatMap((recipe, r) => !shown[r] || !recipe.curve?.[state.axis] ? [] :
    recipe.curve.c.map((_, at) => ({label: recipe.label, about: about(recipe), x: recipe.curve[state.axis][at], y: recipe.curve.y[at],
      low: recipe.curve.low[at], high: recipe.curve.high[at]})));
  const others = study.axes.filter(([id]) => id !== state.axis && id !== "step" && id in study.points);
  const tooltip = [{field: "label", title: "recipe"}, {field: "s", title: "seed"},
    ...(study.points.step ? [{field: "step", title: "step"}] : []), {field: "x", title: axisName(), format: ",.5~g"},
    {field: "reward", title: study.metric}, ...others.map(([id, title]) => ({field: `['${id}']`, title, format: ",.5~g"}))];
  // The number after "±" is the standard error of the evaluation.
  for (const row of rows) row.reward = row.y.toFixed(4) + (row.e === undefined ? "" : ` ± ${row.e.toFixed(4)}`);
  const layer = [];
  if (state.bands) layer.push({data: {values: visible(fitted)}, mark: {type: "area", opacity: .15, clip: true, aria: false},
    encoding: {x, y: y("low"), y2: {field: "high"}, color: colours}});
  if (state.points) layer.push({data: {values: visible(rows)},
    mark: {type: "point", filled: true, size: 22, opacity: .45, stroke: "transparent", strokeWidth: 6, aria: false, cursor: "pointer"},
    encoding: {x, y: y("y"), fill: {...colours}, tooltip}});
  layer.push({data: {values: visible(fitted)}, mark: {type: "line", strokeWidth: 2, clip: true, aria: false},
    encoding: {x, y: y("y"), color: colours, strokeDash: dashes, tooltip: [{field: "label", title: "fit of"}, {field: "about", title: "asymptote A"}]}});
  return {width: "container", height: 420, autosize: {type: "fit", contains: "padding"}, layer,
    description: `${study.metric} against ${axisName()}: evaluations and fitted curves of ${labels.length} recipes`};
}
function asymptotesChart() {
  const narrow = innerWidth < 600 ? 1 : 0;
  const rows = study.recipes.filter((_, r) => shown[r]);
  const y = {field: "label", type: "nominal", sort: null, title: null, scale: {domain: rows.map(recipe => recipe.label)},
    axis: {domain: false, ticks: false, labelExpr: `datum.value === null ? "" : ${JSON.stringify(Object.fromEntries(rows.map(r => [r.label, r.cut[narrow]])))}[datum.value]`}};
  const tooltip = [{field: "label", title: "recipe"}, {field: "about", title: "asymptote A"}];
  for (const row of rows) row.about = about(row);
  const x = field => ({field, type: "quantitative", title: "asymptote A, 95%", scale: {zero: false}});
  const named = rows.filter(row => row.named);
  const best = Math.max(...named.map(row => row.a));
  return {width: "container", height: Math.max(120, 17 * rows.length), autosize: {type: "fit-x", contains: "padding"},
    description: "Asymptotes with their intervals, the best on top", layer: [
      ...(named.length ? [{data: {values: [{from: best - study.margin, to: best}]},
        mark: {type: "rect", opacity: .18, aria: false}, encoding: {x: x("from"), x2: {field: "to"}}}] : []),
      ...(named.length ? [{data: {values: named}, mark: {type: "rule", strokeWidth: 3, aria: false},
        encoding: {x: x("low"), x2: {field: "high"}, y, color: colours}}] : []),
      ...[named, rows.filter(row => !row.named)].flatMap((some, hollow) => some.length ? [{data: {values: some},
        mark: {type: "point", filled: !hollow, opacity: 1, size: 65}, encoding: {x: x("a"), y, color: colours, tooltip}}] : [])]};
}

// A click on a point shows the command that prints the rollouts of its evaluation.
const picked = element("p", {id: "picked", role: "status"}, "Click a point for the command that shows what the model wrote there. Hollow points on the right: A may not be named, so the reward so far is shown.");
function pick(point) {
  const about = `${point.label}, seed ${point.s}` + (point.step === undefined ? "" : `, step ${point.step}`) + `: ${point.reward}. `;
  picked.replaceChildren(about);
  if (point.run === undefined) return picked.append("This point is in no journal, so it has no rollouts.");
  const [run, kept] = study.runs[point.run];
  if (!kept.length) return picked.append("This run has no stored rollouts (rollouts.groups=0, or they were deleted).");
  const step = kept.filter(one => one <= point.step).at(-1) ?? kept[0];
  if (step !== point.step) picked.append(`The nearest stored rollouts are of step ${step}. `);
  const path = /^[\w@%+=:,./-]+$/.test(run) ? run : `'${run.replaceAll("'", `'"'"'`)}'`;
  const code = element("code", {className: "command"}, `scalerl rollouts ${path} --step ${step}`);
  picked.append(code, copyButton("copy", "Copy the command", () => code.textContent));
  const name = run.split("/").at(-1);
  const there = study.shown.find(one => one[0] === name && one[1] === step) ?? study.shown.find(one => one[0] === name);
  if (there) {
    const target = document.getElementById(`rollouts-${there[0]}-${there[1]}`);
    picked.append(" ", element("a", {href: `#${target.id}`}, `Rollouts of step ${there[1]} are on this page.`));
    if (there[1] === step) target.scrollIntoView({behavior: "smooth"});
  }
}

const charts = ["chart-curves", "chart-asymptotes"].map(id => element("div", {id, className: "chart"}));
let drawing = Promise.resolve();
function draw() {
  drawing = drawing.then(async () => {
    const options = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}, config: look};
    const [curves] = await Promise.all([vegaEmbed(charts[0], curvesChart(), options), vegaEmbed(charts[1], asymptotesChart(), options)]);
    curves.view.addEventListener("click", (_, item) => { if (item?.datum?.s !== undefined) pick(item.datum); });
  }).catch(error => { console.error(error); restore(); });
  return drawing;
}
const fixed = document.querySelector(".static");
const figure = element("div", {id: "interactive"});
function restore() { figure.remove(); if (fixed) fixed.hidden = false; }

const choice = (name, input) => element("label", {}, input, " ", name);
const box = (name, checked, on) => {
  const input = element("input", {type: "checkbox", checked});
  input.addEventListener("change", () => { on(input.checked); draw(); });
  return input;
};
const axis = element("select", {id: "axis"}, ...study.axes.map(([value, name]) => element("option", {value}, name)));
axis.addEventListener("change", () => { state.axis = axis.value; draw(); });
const boxes = study.recipes.map((recipe, r) => box(recipe.short, true, on => { shown[r] = on; }));
const all = (name, on) => {
  const button = element("button", {type: "button"}, name);
  button.addEventListener("click", () => { boxes.forEach((one, r) => { one.checked = shown[r] = on; }); draw(); });
  return button;
};
const swatch = recipe => {
  const dash = recipe.dash && DASHES[recipe.dash].join(" ");
  const holder = element("span", {className: "swatch"});
  holder.innerHTML = `<svg width="22" height="8" aria-hidden="true"><line x1="1" y1="4" x2="21" y2="4" stroke="${recipe.colour}" stroke-width="3"${dash ? ` stroke-dasharray="${dash}"` : ""}/></svg>`;
  return holder;
};
const recipes = element("fieldset", {className: "recipes"}, element("legend", {}, "Recipes, best first"),
  ...study.recipes.map((recipe, r) => element("label", {title: recipe.label}, boxes[r], swatch(recipe), recipe.short)));
const log = box("", false, on => { state.log = on; });
const bands = box("", false, on => { state.bands = on; });
const dots = box("", true, on => { state.points = on; });
log.id = "log"; bands.id = "bands"; dots.id = "points";
figure.append(
  element("div", {className: "controls"}, element("label", {}, "Compute axis: ", axis), choice("logarithmic", log),
    choice("95% bands", bands), choice("evaluations", dots), all("all recipes", true), all("none", false)),
  element("div", {className: "charts"}, ...charts), recipes, picked);
if (study.thinned) figure.append(element("p", {className: "soft"},
  `${study.thinned[0]} of ${study.thinned[1]} evaluations are drawn here, picked evenly from each run. The fits use all of them.`));
if (study.axes.length > 1) figure.append(element("p", {className: "soft"},
  `Curves were fitted against ${study.unit}. On another axis they are drawn at the mean position of their runs, and A is the same.`));
fixed.before(figure);
async function load() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), sign => sign.charCodeAt(0));
  const script = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(element("script", {textContent: script}));
}
load().then(draw).then(() => { fixed.hidden = figure.isConnected; document.documentElement.dataset.drawn = "1"; });
})();
