'use strict';
/* What each section of the page draws. */

const SIDE_BY_SIDE = 4;
const PUBLISHED = {encoder: 'circle', decoder: 'circle-open'};
const MANY_HEADS = 2000;

/* Optional measures, their values by chance, and those with a sign. */
const MEASURES = {
  spectral_norm: 'largest singular value σ₁',
  stable_rank: 'stable rank',
  effective_rank: 'effective rank',
  eigenvalue_positivity: 'eigenvalue positivity',
  score_ceiling: 'ceiling of scores',
  rotary_low_share: 'share of slow rotary planes',
  max_logit: 'largest attention logit',
  logit_std: 'standard deviation of the logits',
  attention_entropy: 'entropy of the attention (nats)',
  attention_top_share: 'mean of the largest weights',
};
/* What a monitor measures, and not a scan: also drawn over training steps. */
const IN_TRAINING = ['max_logit', 'attention_entropy'];
const NULLS = {
  symmetry: 'symmetry_null',
  spectral_norm: 'spectral_norm_null',
  stable_rank: 'stable_rank_null',
  effective_rank: 'effective_rank_null',
};
const SIGNED = new Set(['eigenvalue_positivity']);
const MEASURED = Object.keys(MEASURES)
  .filter((name) => GROUPS.some(({rows}) => rows.some((row) => (row[name] ?? null) !== null)));

/** The groups shown by sections with a figure for each. */
function shownGroups(chosen) {
  return GROUPS.length <= SIDE_BY_SIDE ? GROUPS : [GROUPS[chosen.group]];
}

function drawing(id) {
  return document.querySelector(`#${id} .panels`);
}

/* Curves over the layers. */

function drawLayers(chosen) {
  const looks = GROUPS.map((group) => look(group, chosen));
  const last = largest(looks.flatMap(({layers}) => layers), 'layer');
  panels(drawing('layers'), Object.keys(SCORES), (score) => ({
    caption: SCORES[score],
    traces: GROUPS.flatMap((group, i) => layerCurve(group, looks[i], score)),
    layout: layout(wholeAxis('layer', last), scoreAxis('', zoomed())),
  }));
  const few = GROUPS.length <= SIDE_BY_SIDE;
  document.getElementById('explain-null').hidden = !few;
  document.getElementById('explain-band').hidden = !(few && looks.some(({heads}) => heads.length && heads.length <= MANY_HEADS));
}

function layerCurve(group, {layers, heads}, score) {
  const x = layers.map((row) => row.layer);
  const line = {color: seriesColor(group.index), width: 2, dash: seriesDash(group.index)};
  const curves = [{
    x,
    y: layers.map((row) => row[score]),
    name: plain(group.label),
    mode: 'lines+markers',
    line,
    marker: {size: 7, symbol: seriesSymbol(group.index)},
    hovertemplate: `layer %{x}: %{y:.3f}`,
  }];
  const few = GROUPS.length <= SIDE_BY_SIDE;
  if (few && score === 'eigenvalue_positivity') {
    const spread = layers.map((row) => row.eigenvalue_positivity_spread);
    const at = (sign) => spread.map((value) => (value === null ? null : 2 * sign * value));
    curves.unshift(band(x, at(-1), at(1), color('muted', 0.2)));
  }
  if (few && score in NULLS) {
    curves.unshift({
      x,
      y: layers.map((row) => row[NULLS[score]]),
      name: plain(`${group.label}, null`),
      mode: 'lines',
      line: {...line, width: 1, dash: 'dot'},
      showlegend: false,
      hovertemplate: `layer %{x}: %{y:.3f}`,
    });
  }
  if (few && heads.length && heads.length <= MANY_HEADS) {
    curves.unshift({
      x: heads.map((row) => row.layer),
      y: heads.map((row) => row[score]),
      text: heads.map((row) => `head ${row.head}`),
      name: plain(`${group.label}, heads`),
      mode: 'markers',
      marker: {size: 5, color: seriesColor(group.index, 0.5)},
      showlegend: false,
      hovertemplate: 'layer %{x}, %{text}: %{y:.3f}',
    });
  }
  return curves;
}

/* Optional measures of a scan. */

function drawMeasures(chosen) {
  const looks = GROUPS.map((group) => look(group, chosen));
  const last = largest(looks.flatMap(({layers}) => layers), 'layer');
  // The last scores of a run have no logits.
  const shown = MEASURED.filter((name) => looks.some(({layers}) =>
    layers.some((row) => (row[name] ?? null) !== null)));
  panels(drawing('measures'), shown, (name) => ({
    caption: MEASURES[name],
    traces: GROUPS.flatMap((group, i) => layerCurve(group, looks[i], name)),
    layout: layout(wholeAxis('layer', last), axis('', SIGNED.has(name) ? {} : {rangemode: 'tozero'})),
  }));
}

/* Curves over training steps or distances. */

/** The column that varies most often: steps before distances. */
function courseColumn() {
  return [['steps', 'step'], ['distances', 'distance']]
    .find(([values]) => GROUPS.some((group) => group[values].length > 1));
}

function drawCourse(chosen) {
  const [values, column] = courseColumn();
  const other = column === 'step' ? 'distance' : 'step';
  const courses = GROUPS.filter((group) => group[values].length > 1).map((group) => {
    const fixed = notAfter(group[`${other}s`], chosen[other]);
    return {group, layers: group.rows.filter((row) => row.head === null && row[other] === fixed)};
  });
  const measured = IN_TRAINING.filter((name) => MEASURED.includes(name));
  panels(drawing('course'), [...Object.keys(SCORES), ...measured], (score) => ({
    caption: SCORES[score] ?? MEASURES[score],
    traces: courses.flatMap(({group, layers}) => courseCurve(group, layers, column, score, courses.length)),
    layout: layout(axis(column, {zeroline: false}), score in SCORES ? scoreAxis('', true) : axis('', measureAxis(score)), {
      shapes: chosen[column] === null ? [] : [marker(chosen[column])],
    }),
  }));
}

/** Logits grow by powers of ten where they grow. */
function measureAxis(name) {
  return name === 'max_logit' ? {type: 'log'} : {rangemode: 'tozero'};
}

/** A line at the chosen step or distance. */
function marker(x) {
  return {type: 'line', x0: x, x1: x, y0: 0, y1: 1, yref: 'paper', line: {color: color('muted'), width: 1}};
}

function courseCurve(group, layers, column, score, courses) {
  const parts = [...grouped(layers, column)].sort(([a], [b]) => a - b);
  const x = parts.map(([value]) => value);
  const at = (q) => parts.map(([, rows]) => quantile(rows.map((row) => row[score]), q));
  const median = {
    x,
    y: at(0.5),
    name: plain(group.label),
    mode: 'lines+markers',
    marker: {size: 5, symbol: seriesSymbol(group.index)},
    line: {color: seriesColor(group.index), width: 2.5, dash: seriesDash(group.index)},
    hovertemplate: `${column} %{x}: median %{y:.3f}`,
  };
  const single = courses > 1 ? [] : [...grouped(layers, 'layer')].map(([layer, rows]) => ({
    x: rows.map((row) => row[column]),
    y: rows.map((row) => row[score]),
    name: `layer ${layer}`,
    mode: 'lines',
    line: {color: seriesColor(group.index, 0.35), width: 1},
    hovertemplate: `${column} %{x}: %{y:.3f}`,
  }));
  return [band(x, at(0.25), at(0.75), seriesColor(group.index, 0.15)), ...single, median];
}

/* Losses of training runs. */

function drawRuns() {
  const all = DATA.losses;
  const kinds = [...new Set(all.map(({kind}) => kind))];
  const several = new Set(all.map(({name}) => name)).size > 1;
  const named = several ? {
    showlegend: true,
    legend: {orientation: 'h', x: 0, y: 1, yanchor: 'bottom'},
    margin: {l: 44, r: 8, t: 44, b: 40},
  } : {};
  panels(document.getElementById('losses'), kinds, (kind) => ({
    caption: kind === 'symmetry' ? 'median symmetry' : kind,
    traces: all.filter((curve) => curve.kind === kind).flatMap(lossCurve),
    layout: layout(axis('step', {zeroline: false}), axis(kind === 'symmetry' ? '' : 'nats'), named),
  }));
}

function lossCurve(curve, index) {
  const {name, step, mean, low, high} = curve;
  return [band(step, low, high, color(curve.color, 0.15)), {
    x: step,
    y: mean,
    name: plain(name),
    mode: step.length > 1 ? 'lines' : 'markers',
    line: {color: color(curve.color), width: 2, dash: seriesDash(index)},
    hovertemplate: 'step %{x}: %{y:.3f}',
  }];
}

/* Heads. */

function drawHeads(chosen) {
  const looks = shownGroups(chosen)
    .map((group) => ({group, heads: look(group, chosen).heads}))
    .filter(({heads}) => heads.length);
  const figures = looks.flatMap((shown) => [
    () => headMap(shown, chosen),
    () => (shown.heads.length > MANY_HEADS ? headDensity(shown) : headDots(shown)),
  ]);
  panels(drawing('heads'), figures, (draw) => draw());
}

/** The text shown for a head under the pointer. */
function headText(row) {
  const numbers = Object.keys(SCORES).map((score) => `${SCORES[score]} ${cellText(row[score], score)}`);
  return [`layer ${row.layer}, head ${row.head}`, ...numbers, `norm ${cellText(row.norm, 'norm')}`].join('<br>');
}

/** Layers down, heads across. */
function headMap({group, heads}, {score, order}) {
  const layers = [...grouped(heads, 'layer')].sort(([a], [b]) => a - b);
  const lines = layers.map(([, rows]) => rows.toSorted(order === 'score'
    ? (a, b) => (b[score] ?? -Infinity) - (a[score] ?? -Infinity)
    : (a, b) => a.head - b.head));
  const scale = score === 'norm'
    ? {colorscale: rising(), zmin: 0}
    : {colorscale: diverging(), zmin: -1, zmax: 1};
  const name = SCORES[score] ?? score;
  const across = largest(heads, 'head');
  return {
    caption: `${group.label}: ${name}`,
    traces: [{
      type: 'heatmap',
      y: layers.map(([layer]) => layer),
      z: lines.map((rows) => rows.map((row) => row[score])),
      text: lines.map((rows) => rows.map(headText)),
      xgap: heads.length > MANY_HEADS ? 0 : 1,
      ygap: heads.length > MANY_HEADS ? 0 : 1,
      hovertemplate: '%{text}<extra></extra>',
      colorbar: colorBar(''),
      ...scale,
    }],
    layout: layout(
      wholeAxis(order === 'score' ? 'rank within the layer' : 'head', across, {range: [-0.5, across + 0.5], showgrid: false}),
      downwards('layer', largest(heads, 'layer')),
      {height: Math.min(640, Math.max(340, 90 + 16 * layers.length))},
    ),
    clicked: ({pointIndex: [line, place]}) => openHead(group, lines[line][place]),
  };
}

/** One dot for each head, colored by its layer. */
function headDots({group, heads}) {
  return {
    caption: group.label,
    traces: [{
      x: heads.map((row) => row.symmetry),
      y: heads.map((row) => row.directionality_excess),
      text: heads.map(headText),
      mode: 'markers',
      marker: {
        size: 6,
        color: heads.map((row) => row.layer),
        colorscale: [[0, seriesColor(group.index, 0.25)], [1, seriesColor(group.index)]],
        colorbar: layerBar(largest(heads, 'layer')),
        line: {width: 0.5, color: seriesColor(group.index)},
      },
      hovertemplate: '%{text}<extra></extra>',
    }],
    layout: layout(scoreAxis('symmetry', zoomed()), scoreAxis('directionality (excess)', zoomed()), {height: 340}),
    clicked: ({pointIndex}) => openHead(group, heads[pointIndex]),
  };
}

/** A density, in place of too many dots. */
function headDensity({group, heads}) {
  return {
    caption: `${group.label}: ${heads.length.toLocaleString('en')} heads`,
    traces: [{
      type: 'histogram2d',
      x: heads.map((row) => row.symmetry),
      y: heads.map((row) => row.directionality_excess),
      nbinsx: 60,
      nbinsy: 60,
      colorscale: [[0, seriesColor(group.index, 0)], [0.02, seriesColor(group.index, 0.25)], [1, seriesColor(group.index)]],
      colorbar: colorBar('heads'),
      hovertemplate: 'symmetry %{x}<br>directionality (excess) %{y}<br>%{z} heads<extra></extra>',
    }],
    layout: layout(scoreAxis('symmetry', true), scoreAxis('directionality (excess)', true), {height: 340}),
  };
}

/* The terms of a layer's symmetry. */

function drawTerms(chosen) {
  const looks = shownGroups(chosen)
    .map((group) => ({group, layers: look(group, chosen).layers}))
    .filter(({layers}) => layers.some((row) => row.symmetry_within_heads !== null));
  const range = termRange(looks.flatMap(({layers}) => layers));
  panels(drawing('terms'), looks, ({group, layers}) => {
    const x = layers.map((row) => row.layer);
    const term = (name, column, style) => ({
      x,
      y: layers.map((row) => row[column]),
      name,
      hovertemplate: 'layer %{x}: %{y:.3f}',
      ...style,
    });
    return {
      caption: group.label,
      traces: [
        term('between heads', 'symmetry_between_heads', {type: 'bar', marker: {color: color('muted', 0.45)}}),
        term('within heads', 'symmetry_within_heads', {type: 'bar', marker: {color: color('muted')}}),
        term('within heads by chance', 'symmetry_within_random', {
          mode: 'markers',
          x: x.map((layer) => layer + 0.175), // in the middle of the bar within heads
          hovertemplate: 'by chance: %{y:.3f}',
          marker: {symbol: 'x', size: 9, color: color('ink'), line: {width: 1, color: color('paper')}},
        }),
      ],
      layout: layout(wholeAxis('layer', largest(layers, 'layer')), axis('term of the symmetry', {range}), {
        bargap: 0.3,
        showlegend: true,
        legend: {orientation: 'h', x: 0, y: 1, yanchor: 'bottom'},
      }),
    };
  });
}

/** One range for the bars of all panels, so that they can be compared. */
function termRange(layers) {
  const ends = layers.flatMap((row) => TERMS.map((name) => row[name] ?? 0));
  const low = Math.min(0, ...ends);
  const high = Math.max(0, ...ends);
  const room = 0.06 * (high - low || 1);
  return [low < 0 ? low - room : 0, high + room];
}

/* Published models. */

function drawPublished() {
  const {models, own} = DATA.published;
  panels(drawing('published'), [0], (_, width) => ({
    caption: 'Median over layers of published models, and of those scanned',
    traces: [...Object.keys(PUBLISHED).map((stack) => publishedDots(models, stack)), ...own.map(ownDot)],
    layout: layout(axis('symmetry'), axis('directionality (excess)'), {
      height: Math.min(420, Math.max(340, width / 2)),
    }),
  }));
}

function publishedDots(models, stack) {
  const shown = models.filter((model) => model.stack === stack);
  return {
    x: shown.map((model) => model.symmetry),
    y: shown.map((model) => model.directionality),
    text: shown.map((model) => plain(model.name)),
    name: `published ${stack}s`,
    mode: 'markers',
    marker: {size: 7, symbol: PUBLISHED[stack], color: color(`${stack}-0`, 0.6), line: {width: 1}},
    hovertemplate: '%{text}<br>symmetry %{x:.2f}, directionality %{y:.2f}<extra></extra>',
  };
}

function ownDot({group, symmetry, directionality}) {
  return {
    x: [symmetry],
    y: [directionality],
    name: plain(GROUPS[group].label),
    mode: 'markers',
    marker: {size: 14, symbol: seriesSymbol(group), color: seriesColor(group), line: {width: 1, color: color('ink')}},
    hovertemplate: 'symmetry %{x:.3f}, directionality %{y:.3f}',
  };
}
