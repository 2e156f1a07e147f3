'use strict';
/* What details add: matrices with their norms, coupling of heads, outlying dimensions. */

const LEVELS = 127;

function drawMatrices(chosen) {
  const looks = shownGroups(chosen)
    .map((group) => ({group, blocks: look(group, chosen).details}))
    .filter(({blocks}) => blocks.length);
  const figures = looks.flatMap(({group, blocks}) => {
    const block = blocks.findLast(({layer}) => layer <= chosen.layer) ?? blocks[0];
    const coupling = (width) => couplingFigure({group, block}, width);
    return [(width) => matrixFigure({group, block}, width), ...(block.coupling ? [coupling] : [])];
  });
  panels(drawing('matrices'), figures, (draw, width) => draw(width));
  panels(document.getElementById('outlying'), looks, outlyingFigure);
}

/** Signed bytes in base64 as rows of numbers. */
function pixels({image, shape: [height, width], unit}) {
  const bytes = Int8Array.from(atob(image), (character) => character.charCodeAt(0));
  return Array.from({length: height}, (_, i) =>
    Array.from(bytes.subarray(i * width, (i + 1) * width), (level) => unit * level / LEVELS));
}

/** The midpoints of equal parts of a length. */
function middles(length, parts) {
  return Array.from({length: parts}, (_, i) => (i + 0.5) * length / parts - 0.5);
}

function matrixFigure({group, block}, width) {
  const entries = {
    type: 'heatmap',
    x: middles(block.columns, block.shape[1]),
    y: middles(block.rows, block.shape[0]),
    z: pixels(block),
    colorscale: diverging(),
    zmin: -block.unit,
    zmax: block.unit,
    hovertemplate: 'row %{y:.0f}, column %{x:.0f}<br>%{z:.3g}<extra></extra>',
    colorbar: {...colorBar(''), x: 1.02},
  };
  const bare = {showgrid: false, zeroline: false};
  // One number, since a zero would meet the numbers of the matrix.
  const norms = (side) => ({
    ...bare,
    domain: [0.86, 1],
    rangemode: 'tozero',
    tickvals: [roundBelow(Math.max(...block[`${side}_norms`]))],
  });
  return {
    caption: `${group.label}, layer ${block.layer}`,
    said: block.said,
    traces: [entries, ...margin(block, 'column'), ...margin(block, 'row')],
    layout: layout(
      axis('column (key side)', {...bare, domain: [0, 0.84], range: [-0.5, block.columns - 0.5]}),
      axis('row (query side)', {...bare, domain: [0, 0.84], range: [block.rows - 0.5, -0.5]}),
      {
        height: Math.min(440, width),
        xaxis2: axis('', {...norms('row'), anchor: 'y'}),
        yaxis2: axis('', {...norms('column'), anchor: 'x'}),
      },
    ),
  };
}

/** The largest of 1, 2 and 5 times a power of ten that is at most a number. */
function roundBelow(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * ([5, 2].find((factor) => factor * power <= number) ?? 1);
}

/** Norms along one side of the matrix, and its outliers. */
function margin(block, side) {
  const norms = block[`${side}_norms`];
  const places = middles(block[`${side}s`], norms.length);
  const outlying = block[`outlying_${side}s`];
  const turned = (along, values) => (side === 'column'
    ? {x: along, y: values, yaxis: 'y2'}
    : {x: values, y: along, xaxis: 'x2'});
  const value = side === 'column' ? '%{y:.3g}' : '%{x:.3g}';
  const number = side === 'column' ? '%{x:.0f}' : '%{y:.0f}';
  const hovertemplate = `${side} ${number}: norm ${value}<extra></extra>`;
  return [
    {...turned(places, norms), mode: 'lines', line: {width: 1, color: color('muted')}, hovertemplate},
    {
      ...turned(outlying.map(([place]) => place), outlying.map(([, norm]) => norm)),
      mode: 'markers',
      marker: {size: 4, color: color('ink')},
      hovertemplate,
    },
  ];
}

function couplingFigure({group, block}, width) {
  const heads = block.coupling.length;
  return {
    caption: `${group.label}, layer ${block.layer}, coupling of heads`,
    said: block.pair,
    traces: [{
      type: 'heatmap',
      z: block.coupling,
      colorscale: diverging(),
      zmin: -1,
      zmax: 1,
      text: block.coupling.map((row) => row.map((value) => decimals(value, 2))),
      ...(heads * 34 < width ? {texttemplate: '%{text}', textfont: {size: 9}} : {}),
      hovertemplate: 'heads %{y} and %{x}: %{z:.3f}<extra></extra>',
      colorbar: colorBar(''),
    }],
    layout: layout(
      wholeAxis('head b', heads - 1, {range: [-0.5, heads - 0.5], showgrid: false}),
      downwards('head a', heads - 1),
      {height: Math.min(440, width)},
    ),
  };
}

function outlyingFigure({group, blocks}) {
  return {
    caption: group.label,
    traces: [outlyingMarks(blocks, 'column', 'line-ns'), outlyingMarks(blocks, 'row', 'line-ew')],
    layout: layout(
      axis('dimension', {zeroline: false}),
      downwards('layer', largest(blocks, 'layer')),
      {height: Math.min(640, 140 + 14 * blocks.length)},
    ),
  };
}

function outlyingMarks(blocks, side, symbol) {
  const marks = blocks.flatMap((block) =>
    block[`outlying_${side}s`].map(([place, norm]) => ({place, layer: block.layer, ratio: norm / block[`${side}_mean`]})));
  return {
    x: marks.map(({place}) => place),
    y: marks.map(({layer}) => layer),
    customdata: marks.map(({ratio}) => ratio),
    name: `${side}s`,
    mode: 'markers',
    marker: {
      symbol,
      size: marks.map(({ratio}) => Math.min(18, 3 + 2 * ratio)),
      line: {width: 1.5, color: color(side === 'column' ? 'ink' : 'muted')},
    },
    hovertemplate: `dimension %{x}, layer %{y}: ${side} norm %{customdata:.1f} times the mean<extra></extra>`,
  };
}
