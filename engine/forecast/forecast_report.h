// A forecast for people and programs: text, JSON, one HTML page. Pure functions.
#pragma once

#include <string>

#include "engine/forecast/advice.h"

namespace overspill {

std::string forecast_text(const ForecastRequest& request, const Forecast& forecast,
                          const TriedAdvice& advice);
std::string forecast_json(const ForecastRequest& request, const Forecast& forecast,
                          const TriedAdvice& advice);
/// Self-contained: the timeline of a step per lane, the map of the tiers, the tables.
std::string forecast_html(const ForecastRequest& request, const Forecast& forecast,
                          const TriedAdvice& advice);

}  // namespace overspill
