//! A heat map as a picture: a row for each layer, a cell for each expert.
//!
//! Colours tell how often an expert was chosen, as a multiple of the average of its layer's experts, so that models and texts
//! can be compared. They follow the square root of it: few experts are much hotter than the others, and the differences among
//! the others should be seen as well.

use anyhow::bail;
use kt::HeatMap;

use super::canvas::{Canvas, Colour, text_size};

const BACKGROUND: Colour = [17, 18, 23];
const BRIGHT: Colour = [236, 237, 242];
const DIM: Colour = [150, 153, 165];
/// Around everything, and between the parts.
const MARGIN: usize = 28;
const GAP: usize = 10;
/// Dots of the letters of text and title.
const TEXT: usize = 2;
const TITLE: usize = 3;
/// What the cells of all experts and of all layers may take together, as far as cells of at least 3 x 4 pixels allow.
const SPACE: (usize, usize) = (1024, 768);
/// Most experts and layers: more do not fit a screen by far.
const MOST: usize = 2048;
const BAR: (usize, usize) = (18, 160);

/// Where things lie, in pixels.
struct Layout {
    /// Upper left corner of the cells.
    origin: (usize, usize),
    /// Width and height of a cell, the space to the next one counted.
    cell: (usize, usize),
    /// Width and height of all cells.
    cells: (usize, usize),
    size: (usize, usize),
}

impl Layout {
    /// `lines` are the title and the text below it; `label` is the width of the layers' labels, `side` of what is at the right.
    fn new(map: &HeatMap, lines: &[String], label: usize, side: usize) -> Layout {
        let (layers, experts) = (map.layers().len(), widest(map));
        let width = (SPACE.0 / experts).clamp(3, 64);
        let height = (SPACE.1 / layers).clamp(4, 64).min(2 * width + 2);
        let cells = (experts * width, layers * height);
        let line = text_size("", TEXT).1 + GAP;
        let top = MARGIN + text_size("", TITLE).1 + GAP + lines[1..].len() * line + line;
        let origin = (MARGIN + label + GAP, top + GAP);
        let text = lines.iter().enumerate().map(|(i, l)| text_size(l, if i == 0 { TITLE } else { TEXT }).0).max();
        let right = origin.0 + cells.0 + 2 * GAP + side;
        let size = (right.max(MARGIN + text.unwrap_or(0)) + MARGIN, origin.1 + cells.1.max(BAR.1) + 2 * line + MARGIN);
        Layout { origin, cell: (width, height), cells, size }
    }

    /// Corner and size of the cell of an expert, in the layer of this position.
    fn cell(&self, position: usize, expert: usize) -> ((usize, usize), (usize, usize)) {
        let (width, height) = self.cell;
        let space = |length: usize| if length < 7 { 0 } else { 1 + length / 32 };
        let corner = (self.origin.0 + expert * width, self.origin.1 + position * height);
        (corner, (width - space(width), height - space(height)))
    }
}

/// Experts of the layer that has the most.
fn widest(map: &HeatMap) -> usize {
    map.layers().iter().map(|l| l.counts.len()).max().unwrap_or(0)
}

/// How often an expert was chosen, as multiples of the average of the layer.
fn multiples(counts: &[u64]) -> impl Iterator<Item = f64> {
    let sum: f64 = counts.iter().map(|&c| c as f64).sum();
    let average = sum / counts.len() as f64;
    counts.iter().map(move |&c| if sum > 0.0 { c as f64 / average } else { 0.0 })
}

/// Draws the heat map of the model `name`.
///
/// # Errors
/// There are no experts, or more than a picture has room for.
pub fn draw(map: &HeatMap, name: &str) -> anyhow::Result<Canvas> {
    let (layers, experts) = (map.layers().len(), widest(map));
    if layers == 0 || experts == 0 {
        bail!("no heat map: the model has no layers of experts");
    }
    if layers > MOST || experts > MOST {
        bail!("{layers} layers of {experts} experts are too many for a picture; save the heat map as .json");
    }
    let hottest = map.layers().iter().flat_map(|l| multiples(&l.counts)).fold(1.0, f64::max);
    let texts = texts(map, name);
    let ticks = ticks(hottest);
    let label = map
        .layers()
        .iter()
        .map(|l| text_size(&l.layer.to_string(), TEXT).0)
        .fold(text_size("layer", TEXT).0, usize::max);
    let side = ticks.iter().map(|t| text_size(&t.1, TEXT).0).max().unwrap_or(0) + GAP + BAR.0;
    let layout = Layout::new(map, &texts, label, side);
    let mut canvas = Canvas::new(layout.size.0, layout.size.1, BACKGROUND);
    let (text_height, line) = (text_size("", TEXT).1, text_size("", TEXT).1 + GAP);

    canvas.text((MARGIN, MARGIN), &texts[0], TITLE, BRIGHT);
    for (i, text) in texts[1..].iter().enumerate() {
        canvas.text((MARGIN, MARGIN + text_size("", TITLE).1 + GAP + i * line), text, TEXT, DIM);
    }
    for (position, l) in map.layers().iter().enumerate() {
        for (expert, value) in multiples(&l.counts).enumerate() {
            let (corner, size) = layout.cell(position, expert);
            canvas.fill(corner, size, colour((value / hottest).sqrt()));
        }
    }

    let (left, top) = layout.origin;
    let right_aligned = |text: &str| left - GAP - text_size(text, TEXT).0;
    canvas.text((right_aligned("layer"), top - line), "layer", TEXT, DIM);
    for position in labelled(layers, layout.cell.1, text_height + 4) {
        let text = map.layers()[position].layer.to_string();
        let y = top + position * layout.cell.1 + layout.cell.1 / 2;
        canvas.text((right_aligned(&text), y.saturating_sub(text_height / 2 - 1)), &text, TEXT, BRIGHT);
    }
    let below = top + layout.cells.1 + GAP;
    for expert in labelled(experts, layout.cell.0, text_size(&experts.to_string(), TEXT).0 + 16) {
        let text = expert.to_string();
        let middle = left + expert * layout.cell.0 + layout.cell.0 / 2;
        canvas.fill((middle - 1, below - 6), (2, 4), DIM);
        canvas.text((middle.saturating_sub(text_size(&text, TEXT).0 / 2), below), &text, TEXT, BRIGHT);
    }
    let middle = left + layout.cells.0 / 2;
    canvas.text((middle.saturating_sub(text_size("expert", TEXT).0 / 2), below + line), "expert", TEXT, DIM);

    // The colour bar, the hottest on top.
    let bar = (left + layout.cells.0 + 2 * GAP, layout.cells.1.max(BAR.1));
    for y in 0..bar.1 {
        let part = 1.0 - y as f64 / (bar.1 - 1) as f64;
        canvas.fill((bar.0, top + y), (BAR.0, 1), colour(part));
    }
    // From below; a text that would touch the one before is left out.
    let mut free = bar.1 + text_height + 4;
    for (value, text) in ticks {
        let y = ((1.0 - (value / hottest).sqrt()) * (bar.1 - 1) as f64).round() as usize;
        if y + text_height + 4 <= free {
            canvas.fill((bar.0 + BAR.0, top + y), (4, 2), DIM);
            canvas.text((bar.0 + BAR.0 + GAP, top + y.saturating_sub(text_height / 2 - 1)), &text, TEXT, BRIGHT);
            free = y;
        }
    }
    Ok(canvas)
}

/// Title and explanation, line by line.
fn texts(map: &HeatMap, name: &str) -> Vec<String> {
    let (layers, experts, total) = (map.layers().len(), widest(map), map.total());
    let counted = |n: u64, what: &str| format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" });
    let few = map.experts().div_ceil(10);
    let hot: u64 = map.hottest(few).iter().map(|h| h.count).fold(0, u64::saturating_add);
    let share = if total > 0 { hot as f64 / total as f64 * 100.0 } else { 0.0 };
    let unused = map.layers().iter().flat_map(|l| &l.counts).filter(|&&c| c == 0).count();
    let mut name = name.to_owned();
    if let Some((end, _)) = name.char_indices().nth(56) {
        name.truncate(end);
        name += "...";
    }
    vec![
        name,
        format!(
            "{} of {}, {}",
            counted(layers as u64, "layer"),
            counted(experts as u64, "expert"),
            counted(map.tokens(), "token")
        ),
        format!("the hottest 10 % of experts did {share:.1} % of the work; {} never chosen", grouped(unused as u64)),
        "colour: how often chosen; 1x is the average of a layer".into(),
    ]
}

/// `12,345,678`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Which of `count` things of this `length` get a label that needs `room`: every first, second, fifth, tenth …
fn labelled(count: usize, length: usize, room: usize) -> impl Iterator<Item = usize> {
    let steps = (0..).flat_map(|power| [1, 2, 4, 8].map(|n| n * 16usize.pow(power)));
    let step = steps.take_while(|&s| s < count.max(2)).find(|s| s * length >= room).unwrap_or(count.max(1));
    (0..count).step_by(step)
}

/// Values beside the colour bar, from nothing to the hottest, with their texts.
fn ticks(hottest: f64) -> Vec<(f64, String)> {
    let steps = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];
    let mut ticks = vec![(0.0, "0".into())];
    ticks.extend(steps.into_iter().filter(|&s| s < hottest * 0.7).map(|s| (s, format!("{s}x"))));
    ticks.push((hottest, format!("{hottest:.1}x")));
    ticks
}

/// The colour of a value from 0 to 1: equal steps look alike, and the lightness rises all the way. A path through OKLCh.
fn colour(value: f64) -> Colour {
    let t = value.clamp(0.0, 1.0);
    let lightness = 0.24 + 0.70 * t;
    let chroma = 0.06 + 0.30 * t * (1.0 - t) + 0.04 * t;
    let hue = (285.0 + 180.0 * t).to_radians();
    let (a, b) = (chroma * hue.cos(), chroma * hue.sin());
    // OKLab to linear sRGB.
    let l = (lightness + 0.3963377774 * a + 0.2158037573 * b).powi(3);
    let m = (lightness - 0.1055613458 * a - 0.0638541728 * b).powi(3);
    let s = (lightness - 0.0894841775 * a - 1.2914855480 * b).powi(3);
    let linear = [
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    ];
    linear.map(|v| {
        let v = v.clamp(0.0, 1.0);
        let v = if v <= 0.0031308 { 12.92 * v } else { 1.055 * v.powf(1.0 / 2.4) - 0.055 };
        (v * 255.0).round() as u8
    })
}

#[cfg(test)]
mod tests {
    use kt::heat::LayerHeat;

    use super::*;

    /// Some experts much hotter than others, other ones in each layer.
    fn skewed(layers: usize, experts: usize) -> HeatMap {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut layer = |layer| {
            let counts: Vec<u64> = (0..experts).map(|_| (random().powi(5) * 3000.0) as u64).collect();
            LayerHeat { layer, tokens: counts.iter().sum::<u64>() / 8, counts }
        };
        HeatMap::new((0..layers).map(&mut layer).collect()).unwrap()
    }

    /// Width and height of a PNG, and its pixels.
    fn decode(png: &[u8]) -> ((usize, usize), Vec<Colour>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        let pixels = bytes[..info.buffer_size()].chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect();
        ((info.width as usize, info.height as usize), pixels)
    }

    fn brightness([r, g, b]: Colour) -> f64 {
        0.2126 * f64::from(r).powf(2.2) + 0.7152 * f64::from(g).powf(2.2) + 0.0722 * f64::from(b).powf(2.2)
    }

    #[test]
    fn colours_get_brighter_all_the_way() {
        let all: Vec<f64> = (0..=255).map(|i| brightness(colour(f64::from(i) / 255.0))).collect();
        assert!(all.windows(2).all(|w| w[0] <= w[1]) && all[0] > brightness(BACKGROUND), "{all:?}");
        assert!(all.windows(17).all(|w| w[0] < w[16]));
    }

    #[test]
    fn hotter_cells_are_brighter() {
        for (layers, experts) in [(1, 1), (4, 8), (48, 128), (58, 256), (3, 512)] {
            let map = skewed(layers, experts);
            let canvas = draw(&map, "a model").unwrap();
            let (size, pixels) = decode(&canvas.png().unwrap());
            assert_eq!(size, (canvas.width, canvas.height));
            assert!(size.0 < 2048 && size.1 < 1100, "{size:?}");
            let lines = texts(&map, "a model");
            let label = text_size("layer", TEXT).0;
            let layout = Layout::new(&map, &lines, label, 0);
            let at = |(x, y): (usize, usize)| pixels[y * size.0 + x];
            for (position, l) in map.layers().iter().enumerate() {
                let cells: Vec<(f64, Colour)> =
                    multiples(&l.counts).enumerate().map(|(e, v)| (v, at(layout.cell(position, e).0))).collect();
                let hottest = cells.iter().map(|c| c.0).fold(0.0, f64::max);
                for a in &cells {
                    assert_ne!(a.1, BACKGROUND);
                    // Colours nearer to each other than this may be the same but for rounding.
                    let hotter = |b: &(f64, Colour)| b.0.sqrt() > a.0.sqrt() + hottest.sqrt() / 10.0;
                    for b in cells.iter().filter(|b| hotter(b)) {
                        assert!(brightness(b.1) > brightness(a.1), "{a:?} {b:?}");
                    }
                }
            }
            let hottest = map.hottest(experts * layers);
            if hottest.len() > 1 {
                let cell = |h: &kt::heat::Hot| brightness(at(layout.cell(h.layer, h.expert).0));
                assert!(cell(&hottest[0]) > 3.0 * cell(&hottest[hottest.len() - 1]));
            }
        }
    }

    #[test]
    fn an_empty_or_boundless_map_is_refused_and_an_unused_one_is_not() {
        assert!(draw(&HeatMap::default(), "x").err().unwrap().to_string().contains("no layers of experts"));
        let wide = HeatMap::new(vec![LayerHeat { layer: 0, tokens: 0, counts: vec![0; MOST + 1] }]).unwrap();
        assert!(draw(&wide, "x").err().unwrap().to_string().contains(".json"));
        let unused = HeatMap::new(vec![LayerHeat { layer: 0, tokens: 0, counts: vec![0; 4] }]).unwrap();
        draw(&unused, &"é".repeat(500)).unwrap().png().unwrap();
    }

    #[test]
    fn the_text_tells_the_shares() {
        let counts = [vec![90, 1, 1, 1, 1, 1, 1, 1, 1, 0], vec![10; 10]];
        let layers = (3..).zip(counts).map(|(layer, counts)| LayerHeat { layer, tokens: 49_000, counts });
        let lines = texts(&HeatMap::new(layers.collect()).unwrap(), "m.gguf");
        assert_eq!(lines[0], "m.gguf");
        assert_eq!(lines[1], "2 layers of 10 experts, 49,000 tokens");
        // 90 and 10 of 198.
        assert!(lines[2].contains(" 50.5 % ") && lines[2].contains("1 never chosen"), "{}", lines[2]);
        assert_eq!((grouped(0), grouped(999), grouped(1_234_567)), ("0".into(), "999".into(), "1,234,567".into()));
        let labels = |count, length, room| labelled(count, length, room).collect::<Vec<_>>();
        assert_eq!((labels(3, 20, 20), labels(5, 10, 20), labels(2, 1, 20)), (vec![0, 1, 2], vec![0, 2, 4], vec![0]));
        assert_eq!(labels(128, 8, 52), (0..128).step_by(8).collect::<Vec<_>>());
    }
}
